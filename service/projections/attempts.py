"""Fold a run's history into its attempts."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from everstep.wire import Attempt, RunStatus, Verdict, WorkerInfo
from everstep.wire.events import EventKind
from service.model.rows import EventRow

KINDS: Final = frozenset(
    {
        EventKind.SUBMISSION_STARTED,
        EventKind.ATTEMPT_STARTED,
        EventKind.RESTORED,
        EventKind.CHECKPOINT_COMMITTED,
        EventKind.FAILURE,
        EventKind.ATTEMPT_ENDED,
        EventKind.FINISHED,
        EventKind.STATUS,
    }
)


def attempts(events: Iterable[EventRow]) -> list[Attempt]:
    """Return every attempt, oldest first.

    If a driver died before it recorded the end, the attempt ended when the next submission or
    attempt began.
    """
    done: list[Attempt] = []
    current: dict[str, Any] | None = None
    for event in events:
        if event.kind == EventKind.ATTEMPT_STARTED:
            if current is not None:
                done.append(
                    _ended(current, event.at, current["cause"] or Verdict.CONTROL_PLANE.value)
                )
            current = _started(event)
            continue
        if current is None:
            continue
        end = _end(event, current)
        if end is not None:
            done.append(_ended(current, event.at, end))
            current = None
        else:
            _note(event, current)
    return [*done, Attempt.model_validate(current)] if current is not None else done


def _started(event: EventRow) -> dict[str, Any]:
    return {
        "attempt": event.attempt,
        "submission": event.submission,
        "world_size": event.data["world_size"],
        "workers": tuple(WorkerInfo.model_validate(worker) for worker in event.data["workers"]),
        "started_at": _time(event.at),
        "ended_at": None,
        "first_step": None,
        "last_step": None,
        "restored_from": None,
        "cause": None,
    }


def _note(event: EventRow, current: dict[str, Any]) -> None:
    """Add what an event says about the current attempt."""
    if event.kind == EventKind.RESTORED:
        current |= {"first_step": event.data["step"], "restored_from": event.data.get("checkpoint")}
    elif event.kind == EventKind.CHECKPOINT_COMMITTED:
        current["last_step"] = event.data["step"]
    elif event.kind == EventKind.FAILURE:
        current["cause"] = event.data.get("verdict")
        if event.data.get("step") is not None:
            current["last_step"] = event.data["step"]


def _end(event: EventRow, current: dict[str, Any]) -> str | None:
    """Return the cause if this event ends the current attempt, else None."""
    data = event.data
    if event.kind == EventKind.ATTEMPT_ENDED:
        if data.get("last_step") is not None:
            current["last_step"] = data["last_step"]
        return str(data["cause"])
    if event.kind == EventKind.SUBMISSION_STARTED:
        return Verdict.CONTROL_PLANE.value
    if event.kind == EventKind.FINISHED:
        return {"succeeded": "finished", "stopped": "stopped"}.get(
            data["outcome"], current["cause"] or Verdict.UNKNOWN.value
        )
    if event.kind == EventKind.STATUS and (
        RunStatus(data["to"]).terminal or data["to"] == RunStatus.PAUSED
    ):
        return "stopped"
    return None


def _ended(current: dict[str, Any], at: float, cause: str) -> Attempt:
    ended_at = max(_time(at), current["started_at"])
    return Attempt.model_validate({**current, "ended_at": ended_at, "cause": cause})


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
