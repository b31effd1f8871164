"""Fold a run's history into its failures and the recovery from each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from everstep.wire import CausingDrill, Failure, Verdict
from everstep.wire.events import WRONG_BITS, EventKind
from service.model.rows import EventRow
from storage.run_names import CheckpointName

KINDS: Final = frozenset(
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
            if all(one.evidence != damaged.evidence for one in found):
                found.append(damaged)
        elif event.kind == EventKind.CHECKPOINT_FAILED and _is_last_straw(event.data):
            found.append(_failed_saves(event))
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


def _is_last_straw(data: dict[str, Any]) -> bool:
    return data.get("failed_in_a_row") is not None and data["failed_in_a_row"] == data.get(
        "max_failed_saves"
    )


def _failed_saves(event: EventRow) -> Failure:
    return Failure.of(
        event,
        verdict=Verdict.STORAGE,
        step=event.data.get("step"),
        exception=event.data.get("error"),
        evidence={"failed_saves": event.data["failed_in_a_row"]},
        action="training continues; saving is retried",
    )
