"""What events about attempts, failures and the end change in a run's row."""

from __future__ import annotations

from typing import Any

from everstep.text import failure as failure_words
from everstep.wire import Failure, Reason, ReasonCode, RunStatus, Verdict
from service.model.rows import EventRow
from service.model.run_rows import RunRow
from service.projections.changes import NO_WORKERS, Changes, to_status
from service.projections.reasons import cancelled_by_user, paused_by_user, reason_of


def attempt_started(run: RunRow, event: EventRow) -> Changes:
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
