"""The changes that an event makes to its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from everstep.text import failure as failure_words
from everstep.wire import Failure, Reason, ReasonCode, RunStatus, Verdict
from everstep.wire.events import (
    BEGINNINGS,
    MOST_SYSTEM_RANKS,
    OWN_FILES,
    SYSTEM_FIGURES,
    NameLimit,
    lookup,
    system_name,
    validation_name,
)
from everstep.wire.run import Replay
from service.model.rows import METRIC_NAME_CHARS, EventRow, MetricPoint
from service.model.run_rows import RunRow
from service.model.states import is_legal
from service.projections.attempts import cancelled_by_user, paused_by_user, reason_of
from service.projections.checkpoints import stands, submission_of
from storage.checkpoints.reader import is_better

NO_WORKERS: Final[Mapping[str, Any]] = MappingProxyType({"world_size": None, "workers": []})
"""Columns of a run without ranks."""


@dataclass(frozen=True)
class Changes:
    """What to write: ``columns`` of the run's row, a new status if any, and points of metrics."""

    columns: dict[str, Any] = field(default_factory=dict)
    status: RunStatus | None = None
    reason: Reason | None = None
    points: tuple[MetricPoint, ...] = ()


def to_status(run: RunRow, status: RunStatus, reason: Reason | None = None) -> dict[str, Any]:
    """Return arguments of Changes for a new status; none if the transition is not legal.

    For example, a STOPPING run stays STOPPING while its last steps are reported.
    """
    return {"status": status, "reason": reason} if is_legal(run.status, status) else {}


# ---------------------------------------------------------------- attempt changes

# What events about attempts, failures and the end change in a run's row.


def attempt_started(run: RunRow, event: EventRow) -> Changes:
    columns = {
        "attempt": max(run.attempt + 1, event.attempt),
        # From the queue: its owner had paused it, which is no restart, or its preemption counted.
        "restarts": run.restarts + (run.attempt > 0 and run.status is not RunStatus.STARTING),
        "world_size": int(event.data["world_size"]),
        "workers": list(event.data["workers"]),
        "snapshots": None,
        "reason_code": None,
        "reason_message": None,
    }
    return Changes(columns)


def training_started(run: RunRow, event: EventRow) -> Changes:
    columns = {
        name: event.data.get(name) for name in ("total_steps", "steps_per_epoch", "snapshots")
    }
    if event.data.get("guarantee"):
        columns["guarantee"] = event.data["guarantee"]
    return Changes(columns, **to_status(run, RunStatus.RUNNING))


def snapshots(run: RunRow, event: EventRow) -> Changes:
    return Changes({"snapshots": event.data["snapshots"]})


def failure(run: RunRow, event: EventRow) -> Changes:
    """Set RECOVERING. After a storage failure, show the reason until the next attempt starts."""
    columns, reason = dict(NO_WORKERS), None
    if event.data.get("verdict") == Verdict.STORAGE and run.status is not RunStatus.STOPPING:
        failure = Failure.of(event)
        message = f"{failure_words.cause(failure)}; action: {failure.action}"
        reason = Reason(code=ReasonCode.STORAGE_UNAVAILABLE, message=message)
        columns |= {"reason_code": reason.code.value, "reason_message": message}
    return Changes(columns, **to_status(run, RunStatus.RECOVERING, reason))


def recovered(run: RunRow, event: EventRow) -> Changes:
    columns: dict[str, Any] = {"steps_lost_at_restore": 0}
    reported = event.data.get("steps_lost")
    if reported is not None:
        # The driver also knows steps that were lost before they were reported, so its number
        # replaces the one from the journal.
        columns["steps_lost"] = run.steps_lost - run.steps_lost_at_restore + int(reported)
    if event.data.get("unit"):
        since_report_s = event.data.get("since_report_s") or 0.0
        columns["redone_s"] = (run.redone_s or 0.0) + since_report_s
    # If the run has no workers, the attempt failed before the news of its recovery came.
    return Changes(columns, **(to_status(run, RunStatus.RUNNING) if run.workers else {}))


def waiting(_run: RunRow, event: EventRow) -> Changes:
    code = event.data.get("code")
    known = code in set(ReasonCode)
    columns: dict[str, Any] = {
        "reason_code": code if known else ReasonCode.WAITING_FOR_CAPACITY.value,
        "reason_message": str(
            event.data.get("message") or "The cluster has no room for min_workers now."
        ),
    }
    return Changes(columns | dict(NO_WORKERS))


def attempt_ended(run: RunRow, event: EventRow) -> Changes:
    failed = event.data.get("cause") in set(Verdict)
    return Changes(dict(NO_WORKERS), **(to_status(run, RunStatus.RECOVERING) if failed else {}))


def finished(run: RunRow, event: EventRow) -> Changes:
    outcome = event.data["outcome"]
    given = reason_of(event.data.get("reason"))
    columns: dict[str, Any] = dict(NO_WORKERS)
    if event.data.get("step") is not None:
        columns["step"] = int(event.data["step"])
    if outcome == "succeeded":
        return Changes(columns, **to_status(run, RunStatus.SUCCEEDED, given))
    if outcome == "failed":
        return Changes(columns, **to_status(run, RunStatus.FAILED, given))
    cancel = run.stop_requested == "cancel" or (
        given is not None and given.code == ReasonCode.CANCELLED_BY_USER
    )
    if cancel:
        # A cancel after a pause wins, whichever of the two the driver received.
        reason = (
            given if given and given.code == ReasonCode.CANCELLED_BY_USER else cancelled_by_user()
        )
        return Changes(columns, **to_status(run, RunStatus.CANCELLED, reason))
    return Changes(columns, **to_status(run, RunStatus.PAUSED, given or paused_by_user()))


# ---------------------------------------------------------------- checkpoint changes

# What restores and events about checkpoints change in a run's row.

_RECENT_CHECKPOINTS: Final = 64


def restored(run: RunRow, event: EventRow) -> Changes:
    step = int(event.data["step"])
    lost = max(0, run.step - step)
    columns: dict[str, Any] = {
        "step": step,
        "epoch": int(event.data["epoch"]),
        "steps_lost": run.steps_lost + lost,
        "steps_lost_at_restore": lost,
    }
    if event.data.get("source") != OWN_FILES:
        redone_s = (run.redone_s or 0.0) if event.data.get("unit") else None
        columns |= {} if redone_s == run.redone_s else {"redone_s": redone_s}
    if (best := _best_after(run, event)) != run.best:
        columns["best"] = best
    return Changes(columns | _checkpoints(_standing(run.recent_checkpoints, event)))


def _best_after(run: RunRow, restored: EventRow) -> dict[str, Any] | None:
    """Return the best evaluation that still counts after a restore: that of the restored state.

    Older versions do not report it. For them an evaluation after the restored step is dropped, and
    the best one before it is unknown.
    """
    data = restored.data
    if data.get("source") in BEGINNINGS:
        return None
    found = data.get("best")
    if found is not None and found["value"] is not None:
        metric, _ = run.stored_spec.best_by or (found["metric"], "")
        return {"metric": metric, "value": float(found["value"]), "step": int(found["step"])}
    return run.best if run.best and run.best["step"] <= int(data["step"]) else None


def _standing(found: list[dict[str, Any]], restored: EventRow) -> list[dict[str, Any]]:
    """Return the checkpoints that are still valid after a restore: neither rejected nor, for older
    attempts, beyond the restored step."""
    rejected = {item["name"] for item in restored.data.get("rejected") or ()}
    return [item for item in found if item["name"] not in rejected and stands(item, restored)]


def _order(item: dict[str, Any]) -> tuple[int, int, int, str]:
    """Return a sort key: step, submission, attempt. A longer name has a larger attempt number."""
    return item["step"], item["submission"], len(item["name"]), item["name"]


def _checkpoints(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the columns about checkpoints."""
    latest = max(found, key=_order, default=None)
    return {"recent_checkpoints": found[-_RECENT_CHECKPOINTS:], "latest_checkpoint": latest}


def checkpoint_committed(run: RunRow, event: EventRow) -> Changes:
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


def checkpoint_failed(run: RunRow, event: EventRow) -> Changes:
    """Show that saves fail, until one succeeds."""
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
        f"{failed} saves in a row failed, {newest}, and training continues; the last error: "
        f"{data['error']}"
    )
    return Changes({"reason_code": ReasonCode.STORAGE_UNAVAILABLE.value, "reason_message": message})


def checkpoint_gone(run: RunRow, event: EventRow) -> Changes:
    """Remove a checkpoint that was deleted or is corrupt."""
    return Changes(_checkpoints(_without(run, event.data["name"])))


def _without(run: RunRow, name: str) -> list[dict[str, Any]]:
    return [item for item in run.recent_checkpoints if item["name"] != name]


# ---------------------------------------------------------------- metric changes

# What steps, evaluations and ends of epochs change in a run's row.


def metrics(run: RunRow, event: EventRow) -> Changes:
    points = event.data["points"]
    if not points:
        return Changes()
    latest = dict(run.metrics)
    limit = NameLimit(latest)
    rows = []
    for point in points:
        for full_name, value in point["values"].items():
            name = full_name[:METRIC_NAME_CHARS]
            if name not in limit.known and limit.refused([name]):
                continue
            rows.append(MetricPoint(name, int(point["step"]), float(point["at"]), value))
            if value is None:
                latest.pop(name, None)
            else:
                latest[name] = value
    step = int(points[-1]["step"])
    columns: dict[str, Any] = {"metrics": latest, "step": step}
    if (proof := points[-1].get("proof")) is not None:
        columns["chain"] = proof.get("chain")
    if run.started_at is None:
        columns["started_at"] = float(points[0]["at"])
    if run.steps_per_epoch:
        columns["epoch"] = step // run.steps_per_epoch
    return Changes(columns, points=tuple(rows), **to_status(run, RunStatus.RUNNING))


def evaluated(run: RunRow, event: EventRow) -> Changes:
    step, values = int(event.data["step"]), event.data["metrics"]
    named = {validation_name(name)[:METRIC_NAME_CHARS]: value for name, value in values.items()}
    best_by = run.stored_spec.best_by
    always = () if best_by is None else (validation_name(best_by[0]),)
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
    """Return the new best evaluation; None if the old one is still the best."""
    metric, mode = run.stored_spec.best_by or (None, "max")
    value = lookup(values, metric) if metric else None
    if value is None or not is_better(value, run.best["value"] if run.best else None, mode):
        return None
    return {"metric": metric, "value": value, "step": step}


def epoch_completed(run: RunRow, event: EventRow) -> Changes:
    return Changes({"epoch": int(event.data["epoch"]) + 1})


_GPU_FIGURES: Final[Mapping[str, tuple[str, float]]] = MappingProxyType(
    {
        "gpu_busy_percent": ("busy", 100.0),
        "gpu_used_bytes": ("used_bytes", 1.0),
        "gpu_power_w": ("power_w", 1.0),
        "gpu_celsius": ("celsius", 1.0),
    }
)
"""Series, and the field of ``gpu_use`` that it is made of, with a factor."""


def rank_use(run: RunRow, event: EventRow) -> Changes:
    figures = {name: event.data.get(name) for name in SYSTEM_FIGURES if name not in _GPU_FIGURES}
    return _system_points(run, event, figures)


def gpu_use(run: RunRow, event: EventRow) -> Changes:
    figures: dict[str, Any] = {}
    for name, (figure, factor) in _GPU_FIGURES.items():
        value = event.data.get(figure)
        figures[name] = None if value is None else value * factor
    return _system_points(run, event, figures)


def _system_points(run: RunRow, event: EventRow, figures: Mapping[str, Any]) -> Changes:
    """Return a point for each figure that is known, at the whole seconds since the run's
    creation: such a series outlives steps that are repeated, and those of a loop without any."""
    rank, second = int(event.data["rank"]), max(0, int(event.at - run.created_at))
    if not 0 <= rank < MOST_SYSTEM_RANKS:
        return Changes()
    return Changes(
        points=tuple(
            MetricPoint(system_name(name, rank), second, event.at, float(value))
            for name, value in figures.items()
            if value is not None
        )
    )


def compared(run: RunRow, event: EventRow) -> Changes:
    """Return the change that the end of a replay makes."""
    if run.replay_of is None:
        return Changes()
    return Changes({"replay_of": Replay.model_validate(event.data).model_dump(mode="json")})
