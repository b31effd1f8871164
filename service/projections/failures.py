"""Failures of a run with how each was recovered from, folded from its history."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from everstep.events import EventKind
from everstep.wire import Failure, Verdict
from service.db.rows import EventRow

KINDS: Final = frozenset({EventKind.FAILURE, EventKind.RECOVERED})
_FROM_RECOVERY: Final = ("detect_s", "recovery_s", "steps_lost", "world_size_before", "world_size_after")
_DEFAULTS: Final[dict[str, Any]] = {
    **{name: None for name in Failure.model_fields if name not in ("at", "attempt")},
    "evidence": {},
    "action": "",
}


def failures(events: Iterable[EventRow]) -> list[Failure]:
    """Every failure, oldest first. Figures of the recovery go to the failure that it followed, where the failure has none."""
    found: list[dict[str, Any]] = []
    waiting = False
    for event in events:
        if event.kind == EventKind.FAILURE:
            found.append({**_DEFAULTS, **event.data, "at": event.at, "attempt": event.attempt})
            waiting = True
        elif event.kind == EventKind.RECOVERED and waiting:
            for name in _FROM_RECOVERY:
                if found[-1][name] is None:
                    found[-1][name] = event.data.get(name)
            waiting = False
    return [_failure(data) for data in found]


def _failure(data: dict[str, Any]) -> Failure:
    verdict = data["verdict"] if data["verdict"] in set(Verdict) else Verdict.UNKNOWN
    return Failure.model_validate({**data, "verdict": verdict, "at": datetime.fromtimestamp(data["at"], UTC)})
