"""Failures of a run with how each was recovered from, folded from its history."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from everstep.events import EventKind
from everstep.wire import Failure, Verdict
from service.db.rows import EventRow

KINDS: Final = frozenset({EventKind.FAILURE, EventKind.EVIDENCE, EventKind.RECOVERED})
_FROM_RECOVERY: Final = ("detect_s", "recovery_s", "steps_lost", "world_size_before", "world_size_after")
_OF_THE_EVENT: Final = ("at", "attempt", "submission")
_DEFAULTS: Final[dict[str, Any]] = {
    **{name: None for name in Failure.model_fields if name not in _OF_THE_EVENT},
    "evidence": {},
    "action": "",
    "last_lines": (),
}


def failures(events: Iterable[EventRow]) -> list[Failure]:
    """Every failure, oldest first. Figures of the recovery go to the failure that it followed, where the failure has none.

    A rank that just vanished was killed for want of memory where its node's kernel, asked afterwards, says so.
    """
    found: list[dict[str, Any]] = []
    waiting = False
    for event in events:
        if event.kind == EventKind.FAILURE:
            of_event = {"at": event.at, "attempt": event.attempt, "submission": event.submission}
            found.append({**_DEFAULTS, **event.data, **of_event})
            waiting = True
        elif event.kind == EventKind.EVIDENCE:
            _add_evidence(found, event)
        elif event.kind == EventKind.RECOVERED and waiting:
            for name in _FROM_RECOVERY:
                if found[-1][name] is None:
                    found[-1][name] = event.data.get(name)
            if event.data.get("phases"):
                found[-1]["evidence"] = {**found[-1]["evidence"], "recovery_phases": event.data["phases"]}
            waiting = False
    return [_failure(data) for data in found]


def _add_evidence(found: list[dict[str, Any]], event: EventRow) -> None:
    for failure in reversed(found):
        if failure["attempt"] == event.attempt and failure["first_rank"] == event.data.get("rank"):
            failure["evidence"] = {**failure["evidence"], **{name: event.data.get(name) for name in ("oom_line", "oom_kills")}}
            if failure["verdict"] == Verdict.WORKER_LOST:
                failure["verdict"] = Verdict.OUT_OF_MEMORY.value
            return


def _failure(data: dict[str, Any]) -> Failure:
    verdict = data["verdict"] if data["verdict"] in set(Verdict) else Verdict.UNKNOWN
    return Failure.model_validate({**data, "verdict": verdict, "at": datetime.fromtimestamp(data["at"], UTC)})
