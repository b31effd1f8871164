"""Fold a run's history into its attempts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from everstep.spec.plain_text import printable
from everstep.text import failure as failure_words
from everstep.wire import (
    Attempt,
    CausingDrill,
    Failure,
    Reason,
    ReasonCode,
    RunStatus,
    Verdict,
    WorkerInfo,
)
from everstep.wire.alerts import AlertFailure
from everstep.wire.events import WRONG_BITS, EventKind
from service.model.rows import EventRow, to_time
from storage.run_dir import CheckpointName

ATTEMPT_KINDS: Final = frozenset(
    {
        EventKind.SUBMISSION_STARTED,
        EventKind.ATTEMPT_STARTED,
        EventKind.RESTORED,
        EventKind.TRAINING_STARTED,
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
        "built_apart": event.data.get("built_apart") or {},
        "started_at": to_time(event.at),
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
    ended_at = max(to_time(at), current["started_at"])
    return Attempt.model_validate({**current, "ended_at": ended_at, "cause": cause})


# ---------------------------------------------------------------- failures

# Fold a run's history into its failures and the recovery from each.

FAILURE_KINDS: Final = frozenset(
    {
        EventKind.FAILURE,
        EventKind.EVIDENCE,
        EventKind.RECOVERED,
        EventKind.RESTORED,
        EventKind.CHECKPOINT_CORRUPT,
        EventKind.CHECKPOINT_FAILED,
        EventKind.JOURNAL_DAMAGED,
        EventKind.DRILL_REQUESTED,
        EventKind.DRILL_STARTED,
    }
)
_FROM_RECOVERY: Final = (
    "detect_s",
    "recovery_s",
    "steps_lost",
    "world_size_before",
    "world_size_after",
    "rung",
)


def failures(events: Iterable[EventRow]) -> list[Failure]:
    """Return every failure, oldest first, damaged checkpoints included.

    - A recovery adds its cost to the failure before it: the last one of an earlier attempt, since a
      recovery may be told of once its own attempt has failed.
    - A drill that was started is the cause of the next failure of its attempt.
    - A lost worker becomes ``out_of_memory`` if its node's kernel reports that it killed it.
    - Failed saves are one failure, once there are so many in a row that the run is
      ``storage_unavailable``.
    """
    found: list[Failure] = []
    waiting: list[int] = []
    damage: set[str] = set()
    requested: dict[str, EventRow] = {}
    drill: EventRow | None = None
    for event in events:
        if event.kind == EventKind.DRILL_REQUESTED:
            requested[str(event.data["id"])] = event
        elif event.kind == EventKind.DRILL_STARTED:
            drill = requested.get(str(event.data.get("id")))
        elif event.kind == EventKind.FAILURE:
            waiting.append(len(found))
            found.append(_by_drill(Failure.of(event), drill))
            drill = None
        elif event.kind == EventKind.EVIDENCE:
            _add_evidence(found, event)
        elif event.kind == EventKind.RECOVERED:
            over = [number for number in waiting if found[number].attempt < event.attempt]
            if over:
                found[over[-1]] = _recovered(found[over[-1]], event)
                waiting = [number for number in waiting if number > over[-1]]
        elif event.kind == EventKind.RESTORED:
            instead = event.data.get("checkpoint") or event.data.get("source")
            action = f"continued from step {event.data.get('step')} ({instead})"
            for bad in event.data.get("rejected") or ():
                found += _corrupt(event, bad, action)
        elif event.kind == EventKind.CHECKPOINT_CORRUPT:
            found += _corrupt(event, event.data, "restores skip it")
        elif event.kind == EventKind.JOURNAL_DAMAGED:
            damaged = _damaged_journal(event)
            if (line := repr(damaged.evidence)) not in damage:
                damage.add(line)
                found.append(damaged)
        elif event.kind == EventKind.CHECKPOINT_FAILED:
            most = event.data.get("max_failed_saves")
            if most is not None and event.data.get("failed_in_a_row") == most:
                found.append(_failed_saves(event))
    for failure in found:  # evidence of which nobody can speak is that of a forged event
        failure_words.sentence(failure)
        failure_words.story(failure)
    return found


def _by_drill(failure: Failure, drill: EventRow | None) -> Failure:
    """Return the failure with its drill, if one was started on its attempt. A driver that was lost
    names no attempt."""
    if drill is None or failure.attempt not in (0, drill.attempt):
        return failure
    data = drill.data
    ordered = CausingDrill(id=str(data["id"]), kind=str(data["kind"]), by=data.get("by"))
    return _with(failure, drill=ordered)


def _recovered(failure: Failure, event: EventRow) -> Failure:
    """Return the failure with the cost of its recovery, unless that was known before."""
    cost = {name: event.data.get(name) for name in _FROM_RECOVERY if getattr(failure, name) is None}
    found = {"recovery_phases": event.data.get("phases")}
    if event.data.get("unit"):
        # Of a user's own loop nobody knows the steps between two reports.
        found |= {"lost_unit": event.data["unit"], "since_report_s": event.data["since_report_s"]}
    cost["evidence"] = {
        **failure.evidence,
        **{name: value for name, value in found.items() if value is not None and value != {}},
    }
    return _with(failure, **cost)


def _with(failure: Failure, **changes: Any) -> Failure:
    return Failure.model_validate({**dict(failure), **changes})


def _corrupt(event: EventRow, bad: dict[str, Any], action: str) -> list[Failure]:
    """Return a damaged checkpoint as a storage failure; nothing for a snapshot, or for a state that
    is distrusted because of another failure."""
    name = CheckpointName.parse(str(bad.get("name")))
    if name is None or WRONG_BITS in str(bad.get("problem")):
        return []
    evidence = {"checkpoint": str(name), "found_by": bad.get("found_by", "restore")}
    return [
        Failure.of(
            event,
            verdict=Verdict.STORAGE,
            step=name.step,
            exception=bad.get("problem"),
            evidence=evidence,
            action=action,
        )
    ]


def _damaged_journal(event: EventRow) -> Failure:
    lines = ", ".join(map(str, event.data.get("lines") or ())) or "?"
    return Failure.of(
        event,
        verdict=Verdict.STORAGE,
        exception=f"{event.data.get('file')}, line {lines}: {event.data.get('problem')}",
        evidence={"journal": event.data.get("file"), "lines": event.data.get("lines")},
        action="the event in this line is lost; later lines are read",
    )


def _add_evidence(found: list[Failure], event: EventRow) -> None:
    """Add what a node's kernel reported later to the failure of that rank."""
    for number, failure in reversed(list(enumerate(found))):
        if (failure.attempt, failure.first_rank) == (event.attempt, event.data.get("rank")):
            kernel_facts = {name: event.data.get(name) for name in ("oom_line", "oom_kills")}
            was_lost = failure.verdict is Verdict.WORKER_LOST
            found[number] = _with(
                failure,
                evidence=failure.evidence | kernel_facts,
                verdict=Verdict.OUT_OF_MEMORY if was_lost else failure.verdict,
            )
            return


def _failed_saves(event: EventRow) -> Failure:
    return Failure.of(
        event,
        verdict=Verdict.STORAGE,
        step=event.data.get("step"),
        exception=event.data.get("error"),
        evidence={"failed_saves": event.data["failed_in_a_row"]},
        action="training continues; saving is retried",
    )


# ---------------------------------------------------------------- reasons

# Build the reasons that a run shows for its status.


def cancelled_by_user() -> Reason:
    return Reason(code=ReasonCode.CANCELLED_BY_USER, message="Cancelled through the API.")


def paused_by_user() -> Reason:
    return Reason(
        code=ReasonCode.PAUSED_BY_USER,
        message="Paused through the API; POST …/resume continues it.",
    )


def preempted(by: str | None) -> Reason:
    """Return the reason for a pause in favour of run ``by``.

    None means a run of another project, which this project's users must not see.
    """
    whom = f"run {by}" if by else "a run of another project,"
    message = (
        f"Paused for {whom} of higher priority; it resumes by itself, from its last checkpoint, "
        "once there is room."
    )
    return Reason(code=ReasonCode.PREEMPTED_BY_PRIORITY, message=message)


def reason_of(data: dict[str, Any] | None) -> Reason | None:
    if not data:
        return None
    code = data.get("code")
    known = ReasonCode(code) if code in set(ReasonCode) else ReasonCode.SYSTEM_FAILURES_EXHAUSTED
    return Reason(code=known, message=str(data.get("message") or code))


# ---------------------------------------------------------------- told failures

_MOST_CHARS: Final = 500


def failure_of(fault: Failure) -> AlertFailure:
    """Return what receivers get of a failure."""
    return AlertFailure(
        **fault.model_dump(
            include={"at", "verdict", "first_rank", "node_id", "step", "steps_lost"}
            | {"detect_s", "recovery_s"}
        ),
        exception=first_line(failure_words.cause(fault)) or None,
        action=fault.action or "no action",
        drill=failure_words.drill(fault.drill) if fault.drill else None,
    )


def first_line(text: str) -> str:
    """Return the first line of a text of user code, cut to a length that every receiver takes."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    shown = printable(first.strip())
    return shown if len(shown) <= _MOST_CHARS else f"{shown[: _MOST_CHARS - 1]}…"
