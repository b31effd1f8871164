"""Failures of a run with how each was recovered from, folded from its history."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

from everstep.events import EventKind
from everstep.wire import Failure, Verdict
from service.db.rows import EventRow

KINDS: Final = frozenset({EventKind.FAILURE, EventKind.RECOVERED, EventKind.CHECKPOINT_FAILED})
_FROM_RECOVERY: Final = ("detect_s", "recovery_s", "steps_lost", "world_size_before", "world_size_after")
_DEFAULTS: Final[dict[str, Any]] = {
    **{name: None for name in Failure.model_fields if name not in ("at", "attempt")},
    "evidence": {},
    "action": "",
}


def failures(events: Iterable[EventRow]) -> list[Failure]:
    """Every failure, oldest first. Figures of the recovery go to the failure that it followed, where the failure has none.

    Saves that fail are one failure, told when there were so many in a row that the run is ``storage_unavailable``.
    """
    found: list[dict[str, Any]] = []
    waiting: dict[str, Any] | None = None
    for event in events:
        if event.kind == EventKind.FAILURE:
            found.append({**_DEFAULTS, **event.data, "at": event.at, "attempt": event.attempt})
            waiting = found[-1]
        elif event.kind == EventKind.RECOVERED and waiting is not None:
            for name in _FROM_RECOVERY:
                if waiting[name] is None:
                    waiting[name] = event.data.get(name)
            waiting = None
        elif event.kind == EventKind.CHECKPOINT_FAILED and _is_last_straw(event.data):
            found.append({**_DEFAULTS, **_failed_saves(event.data), "at": event.at, "attempt": event.attempt})
    return [_failure(data) for data in found]


def _is_last_straw(data: dict[str, Any]) -> bool:
    return data.get("failed_in_a_row") is not None and data["failed_in_a_row"] == data.get("max_failed_saves")


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
    return Failure.model_validate({**data, "verdict": verdict, "at": datetime.fromtimestamp(data["at"], UTC)})
