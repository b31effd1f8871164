"""Failures of a run with how each was recovered from, folded from its history."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from everstep.wire import Failure, Verdict
from everstep.wire.events import EventKind
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
    }
)
_FROM_RECOVERY: Final = (
    "detect_s",
    "recovery_s",
    "steps_lost",
    "world_size_before",
    "world_size_after",
)
_OF_THE_EVENT: Final = ("at", "attempt", "submission")
_DEFAULTS: Final[dict[str, Any]] = {
    **{name: None for name in Failure.model_fields if name not in _OF_THE_EVENT},
    "evidence": {},
    "action": "",
    "last_lines": (),
}


def failures(events: Iterable[EventRow]) -> list[Failure]:
    """Every failure, oldest first, damaged checkpoints too. Figures of the recovery go to the
    failure of an attempt that it followed, where that has none. A rank that just vanished was
    killed for want of memory where its node's kernel says so. Saves that fail are one failure, told
    when there were so many in a row that the run is ``storage_unavailable``.
    """
    found: list[dict[str, Any]] = []
    waiting: dict[str, Any] | None = None
    for event in events:
        if event.kind == EventKind.FAILURE:
            waiting = {**_DEFAULTS, **event.data, **_place(event)}
            found.append(waiting)
        elif event.kind == EventKind.EVIDENCE:
            _add_evidence(found, event)
        elif event.kind == EventKind.RECOVERED and waiting is not None:
            for name in _FROM_RECOVERY:
                if waiting[name] is None:
                    waiting[name] = event.data.get(name)
            if event.data.get("phases"):
                waiting["evidence"] = {
                    **waiting["evidence"],
                    "recovery_phases": event.data["phases"],
                }
            waiting = None
        elif event.kind == EventKind.RESTORED:
            instead = event.data.get("checkpoint") or event.data.get("source")
            action = f"went on from step {event.data.get('step')} ({instead})"
            found += [_corrupt(event, bad, action) for bad in event.data.get("rejected") or ()]
        elif event.kind == EventKind.CHECKPOINT_CORRUPT:
            found.append(_corrupt(event, event.data, "a restore passes it over"))
        elif event.kind == EventKind.JOURNAL_DAMAGED:
            damaged = _damaged_journal(event)
            found += (
                [damaged]
                if all(one.get("evidence") != damaged["evidence"] for one in found)
                else []
            )
        elif event.kind == EventKind.CHECKPOINT_FAILED and _is_last_straw(event.data):
            found.append({**_DEFAULTS, **_failed_saves(event.data), **_place(event)})
    return [_failure(data) for data in found if data]


def _place(event: EventRow) -> dict[str, Any]:
    return {name: getattr(event, name) for name in _OF_THE_EVENT}


def _corrupt(event: EventRow, bad: dict[str, Any], action: str) -> dict[str, Any]:
    """A checkpoint that was found to be damaged, as a failure of storage; empty where it was a
    snapshot."""
    name = CheckpointName.parse(str(bad.get("name")))
    if name is None:
        return {}
    return {
        **_DEFAULTS,
        **_place(event),
        "verdict": Verdict.STORAGE.value,
        "step": name.step,
        "exception": bad.get("problem"),
        "evidence": {"checkpoint": str(name), "found_by": bad.get("found_by", "restore")},
        "action": action,
    }


def _damaged_journal(event: EventRow) -> dict[str, Any]:
    lines = ", ".join(map(str, event.data.get("lines") or ())) or "?"
    return {
        **_DEFAULTS,
        **_place(event),
        "verdict": Verdict.STORAGE.value,
        "exception": f"{event.data.get('file')}, line {lines}: {event.data.get('problem')}",
        "evidence": {"journal": event.data.get("file"), "lines": event.data.get("lines")},
        "action": "what the line told is lost; what comes behind it is read",
    }


def _add_evidence(found: list[dict[str, Any]], event: EventRow) -> None:
    for failure in reversed(found):
        if (
            failure
            and failure["attempt"] == event.attempt
            and failure["first_rank"] == event.data.get("rank")
        ):
            failure["evidence"] = {
                **failure["evidence"],
                **{name: event.data.get(name) for name in ("oom_line", "oom_kills")},
            }
            if failure["verdict"] == Verdict.WORKER_LOST:
                failure["verdict"] = Verdict.OUT_OF_MEMORY.value
            return


def _is_last_straw(data: dict[str, Any]) -> bool:
    return data.get("failed_in_a_row") is not None and data["failed_in_a_row"] == data.get(
        "max_failed_saves"
    )


def _failed_saves(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "verdict": Verdict.STORAGE.value,
        "step": data.get("step"),
        "exception": data.get("error"),
        "evidence": {"failed_saves": data["failed_in_a_row"]},
        "action": "training goes on; saving is tried again",
    }


def _failure(data: dict[str, Any]) -> Failure:
    verdict = data["verdict"] if data["verdict"] in set(Verdict) else Verdict.UNKNOWN
    return Failure.model_validate(
        {**data, "verdict": verdict, "at": datetime.fromtimestamp(data["at"], UTC)}
    )
