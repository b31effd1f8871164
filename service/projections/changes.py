"""What one event means for its run's row: a pure function, so that a journal can be applied again
with the same result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from everstep.text import failure as failure_words
from everstep.wire import Failure, Reason, ReasonCode, RunStatus, Verdict
from everstep.wire.events import BEGINNINGS, EventKind
from everstep.wire.metric_names import NameLimit, lookup, validation_name
from service.model.rows import METRIC_NAME_CHARS, EventRow, MetricPoint
from service.model.run_rows import RunRow
from service.model.states import is_legal
from service.projections.checkpoints import stands, submission_of
from storage.checkpoints.lineage import is_better

NO_WORKERS: Final[Mapping[str, Any]] = MappingProxyType({"world_size": None, "workers": []})
"""Columns of a run of which nothing trains."""
_RECENT_CHECKPOINTS: Final = 64


@dataclass(frozen=True)
class Changes:
    """What to write: ``columns`` of the run's row, a change of status where one is legal, and
    points of metrics."""

    columns: dict[str, Any] = field(default_factory=dict)
    status: RunStatus | None = None
    reason: Reason | None = None
    points: tuple[MetricPoint, ...] = ()


def project(run: RunRow, event: EventRow) -> Changes:
    """What ``event`` changes about ``run``; kinds that change nothing give empty Changes.

    Unknown kinds are kept as history and change nothing, so that a newer driver can be read by an
    older service.
    """
    handler = _HANDLERS.get(event.kind)
    return handler(run, event) if handler else Changes()


def _to(run: RunRow, status: RunStatus, reason: Reason | None = None) -> dict[str, Any]:
    """Arguments of Changes for a status that the events imply. One that is illegal now is left out:
    a run that is STOPPING stays so while its last steps are reported."""
    return {"status": status, "reason": reason} if is_legal(run.status, status) else {}


def _attempt_started(run: RunRow, event: EventRow) -> Changes:
    columns = {
        "attempt": max(run.attempt + 1, event.attempt),
        "restarts": run.restarts + (run.attempt > 0),
        "world_size": int(event.data["world_size"]),
        "workers": list(event.data["workers"]),
        "snapshots": None,
        "reason_code": None,
        "reason_message": None,
    }
    return Changes(columns)


def _restored(run: RunRow, event: EventRow) -> Changes:
    step = int(event.data["step"])
    lost = max(0, run.step - step)
    columns: dict[str, Any] = {
        "step": step,
        "epoch": int(event.data["epoch"]),
        "steps_lost": run.steps_lost + lost,
        "steps_lost_at_restore": lost,
    }
    if (best := _best_after(run, event)) != run.best:
        columns["best"] = best
    return Changes(columns | _checkpoints(_standing(run.recent_checkpoints, event)))


def _best_after(run: RunRow, restored: EventRow) -> dict[str, Any] | None:
    """Return the best evaluation that still counts after a restore: the one in the restored state.

    Older versions do not report it. There an evaluation beyond the restore is dropped, and what was
    the best before it is not known.
    """
    data = restored.data
    if data.get("source") in BEGINNINGS:
        return None
    found = data.get("best")
    if found is not None and found["value"] is not None:
        metric = run.spec["checkpoint"]["best_metric"]
        return {"metric": metric, "value": float(found["value"]), "step": int(found["step"])}
    return run.best if run.best and run.best["step"] <= int(data["step"]) else None


def _standing(found: list[dict[str, Any]], restored: EventRow) -> list[dict[str, Any]]:
    """Checkpoints that a restore lets stand: sound, and for those of older attempts not beyond
    where it went on."""
    rejected = {item["name"] for item in restored.data.get("rejected") or ()}
    return [item for item in found if item["name"] not in rejected and stands(item, restored)]


def _order(item: dict[str, Any]) -> tuple[int, int, int, str]:
    """By step, then by submission and attempt: a longer name has a larger attempt, or one at
    all."""
    return item["step"], item["submission"], len(item["name"]), item["name"]


def _checkpoints(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Columns that tell which checkpoints there are."""
    latest = max(found, key=_order, default=None)
    return {"recent_checkpoints": found[-_RECENT_CHECKPOINTS:], "latest_checkpoint": latest}


def _training_started(run: RunRow, event: EventRow) -> Changes:
    columns = {
        name: event.data.get(name) for name in ("total_steps", "steps_per_epoch", "snapshots")
    }
    if event.data.get("guarantee"):
        columns["guarantee"] = event.data["guarantee"]
    return Changes(columns, **_to(run, RunStatus.RUNNING))


def _snapshots(run: RunRow, event: EventRow) -> Changes:
    return Changes({"snapshots": event.data["snapshots"]})


def _metrics(run: RunRow, event: EventRow) -> Changes:
    points = event.data["points"]
    if not points:
        return Changes()
    latest = dict(run.metrics)
    limit = NameLimit(latest)
    rows = []
    for point in points:
        for told, value in point["values"].items():
            name = told[:METRIC_NAME_CHARS]
            if name not in limit.known and limit.refused([name]):
                continue
            rows.append(MetricPoint(name, int(point["step"]), float(point["at"]), value))
            if value is None:
                latest.pop(name, None)
            else:
                latest[name] = value
    step = int(points[-1]["step"])
    columns: dict[str, Any] = {"metrics": latest, "step": step}
    if run.started_at is None:
        columns["started_at"] = float(points[0]["at"])
    if run.steps_per_epoch:
        columns["epoch"] = _epoch_at(run, step // run.steps_per_epoch)
    return Changes(columns, points=tuple(rows), **_to(run, RunStatus.RUNNING))


def _evaluated(run: RunRow, event: EventRow) -> Changes:
    step, values = int(event.data["step"]), event.data["metrics"]
    named = {validation_name(name)[:METRIC_NAME_CHARS]: value for name, value in values.items()}
    best_metric = run.stored_spec.checkpoint.best_metric
    always = () if best_metric is None else (validation_name(best_metric),)
    for name in NameLimit(run.metrics).refused(list(named), always=always):
        del named[name]
    columns: dict[str, Any] = {
        "metrics": run.metrics | {name: value for name, value in named.items() if value is not None}
    }
    best = _better(run, step, values)
    if best is not None:
        columns["best"] = best
    return Changes(
        columns,
        points=tuple(MetricPoint(name, step, event.at, value) for name, value in named.items()),
    )


def _better(run: RunRow, step: int, values: dict[str, float | None]) -> dict[str, Any] | None:
    """The new best evaluation, or None where the old one stands."""
    checkpoint = run.stored_spec.checkpoint
    metric = checkpoint.best_metric
    value = lookup(values, metric) if metric else None
    if value is None:
        return None
    if not is_better(value, run.best["value"] if run.best else None, checkpoint.best_mode):
        return None
    return {"metric": metric, "value": value, "step": step}


def _epoch_completed(run: RunRow, event: EventRow) -> Changes:
    return Changes({"epoch": _epoch_at(run, int(event.data["epoch"]) + 1)})


def _epoch_at(run: RunRow, epoch: int) -> int:
    """Epoch in progress; the last one stays in progress to the end."""
    return min(epoch, run.stored_spec.train.epochs - 1)


def _checkpoint_committed(run: RunRow, event: EventRow) -> Changes:
    data = event.data
    committed = {
        "step": int(data["step"]),
        "submission": submission_of(event),
        "name": data["name"],
        "committed_at": event.at,
        "size_bytes": int(data["size_bytes"]),
    }
    columns = _checkpoints([*_without(run, data["name"]), committed])
    if run.reason_code == ReasonCode.STORAGE_UNAVAILABLE and run.status is RunStatus.RUNNING:
        columns |= {"reason_code": None, "reason_message": None}
    return Changes(columns)


def _checkpoint_failed(run: RunRow, event: EventRow) -> Changes:
    """A run that trains while no checkpoint can be saved says so, until one is."""
    data = event.data
    failed, limit = data.get("failed_in_a_row"), data.get("max_failed_saves")
    if run.status is not RunStatus.RUNNING or failed is None or limit is None or failed < limit:
        return Changes()
    newest = (
        f"the newest checkpoint is of step {run.latest_checkpoint['step']}"
        if run.latest_checkpoint
        else "there is none yet"
    )
    message = (
        f"{failed} saves in a row failed, {newest}, and training goes on; the last one said: "
        f"{data['error']}"
    )
    return Changes({"reason_code": ReasonCode.STORAGE_UNAVAILABLE.value, "reason_message": message})


def _checkpoint_gone(run: RunRow, event: EventRow) -> Changes:
    """Deleted or found to be corrupt: either way nothing to go back to."""
    return Changes(_checkpoints(_without(run, event.data["name"])))


def _without(run: RunRow, name: str) -> list[dict[str, Any]]:
    return [item for item in run.recent_checkpoints if item["name"] != name]


def _failure(run: RunRow, event: EventRow) -> Changes:
    """The run recovers; while it waits for its storage it says so, until the next attempt
    starts."""
    columns, reason = dict(NO_WORKERS), None
    if event.data.get("verdict") == Verdict.STORAGE and run.status is not RunStatus.STOPPING:
        failure = Failure.of(event)
        message = f"{failure_words.cause(failure)}; what is done: {failure.action}"
        reason = Reason(code=ReasonCode.STORAGE_UNAVAILABLE, message=message)
        columns |= {"reason_code": reason.code.value, "reason_message": message}
    return Changes(columns, **_to(run, RunStatus.RECOVERING, reason))


def _recovered(run: RunRow, event: EventRow) -> Changes:
    columns: dict[str, Any] = {"steps_lost_at_restore": 0}
    reported = event.data.get("steps_lost")
    if reported is not None:
        # The driver knows steps that died before they were reported; it replaces what we could tell
        # from the journal.
        columns["steps_lost"] = run.steps_lost - run.steps_lost_at_restore + int(reported)
    return Changes(columns, **_to(run, RunStatus.RUNNING))


def _waiting(_run: RunRow, event: EventRow) -> Changes:
    code = event.data.get("code")
    known = code in set(ReasonCode)
    columns: dict[str, Any] = {
        "reason_code": code if known else ReasonCode.WAITING_FOR_CAPACITY.value,
        "reason_message": str(
            event.data.get("message") or "The cluster has no room for min_workers now."
        ),
    }
    return Changes(columns | dict(NO_WORKERS))


def _attempt_ended(run: RunRow, event: EventRow) -> Changes:
    failed = event.data.get("cause") in set(Verdict)
    return Changes(dict(NO_WORKERS), **(_to(run, RunStatus.RECOVERING) if failed else {}))


def _finished(run: RunRow, event: EventRow) -> Changes:
    outcome = event.data["outcome"]
    given = _reason(event.data.get("reason"))
    columns: dict[str, Any] = dict(NO_WORKERS)
    if event.data.get("step") is not None:
        columns["step"] = int(event.data["step"])
    if outcome == "succeeded":
        return Changes(columns, **_to(run, RunStatus.SUCCEEDED, given))
    if outcome == "failed":
        return Changes(columns, **_to(run, RunStatus.FAILED, given))
    cancel = run.stop_requested == "cancel" or (
        given is not None and given.code == ReasonCode.CANCELLED_BY_USER
    )
    if cancel:
        # A cancel that came after a pause wins, whichever of the two the driver had heard of.
        reason = (
            given if given and given.code == ReasonCode.CANCELLED_BY_USER else cancelled_by_user()
        )
        return Changes(columns, **_to(run, RunStatus.CANCELLED, reason))
    return Changes(columns, **_to(run, RunStatus.PAUSED, given or paused_by_user()))


def cancelled_by_user() -> Reason:
    return Reason(code=ReasonCode.CANCELLED_BY_USER, message="Cancelled through the API.")


def paused_by_user() -> Reason:
    return Reason(
        code=ReasonCode.PAUSED_BY_USER,
        message="Paused through the API; POST …/resume continues it.",
    )


def preempted(by: str | None) -> Reason:
    """``by`` is None where it is a run of another project, of which this one's users are to see
    nothing."""
    whom = f"run {by}" if by else "a run of another project,"
    message = (
        f"Paused for {whom} of a higher priority; it goes on by itself, from its last checkpoint, "
        "once there is room."
    )
    return Reason(code=ReasonCode.PREEMPTED_BY_PRIORITY, message=message)


def _reason(data: dict[str, Any] | None) -> Reason | None:
    if not data:
        return None
    code = data.get("code")
    known = ReasonCode(code) if code in set(ReasonCode) else ReasonCode.SYSTEM_FAILURES_EXHAUSTED
    return Reason(code=known, message=str(data.get("message") or code))


_HANDLERS: Final[Mapping[str, Callable[[RunRow, EventRow], Changes]]] = {
    EventKind.ATTEMPT_STARTED: _attempt_started,
    EventKind.RESTORED: _restored,
    EventKind.TRAINING_STARTED: _training_started,
    EventKind.SNAPSHOTS: _snapshots,
    EventKind.METRICS: _metrics,
    EventKind.EVALUATED: _evaluated,
    EventKind.EPOCH_COMPLETED: _epoch_completed,
    EventKind.CHECKPOINT_COMMITTED: _checkpoint_committed,
    EventKind.CHECKPOINT_DELETED: _checkpoint_gone,
    EventKind.CHECKPOINT_CORRUPT: _checkpoint_gone,
    EventKind.CHECKPOINT_FAILED: _checkpoint_failed,
    EventKind.FAILURE: _failure,
    EventKind.RECOVERED: _recovered,
    EventKind.WAITING: _waiting,
    EventKind.ATTEMPT_ENDED: _attempt_ended,
    EventKind.FINISHED: _finished,
}
