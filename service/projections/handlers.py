"""Compute what one event changes about its run. Pure, so that a journal can be applied again with
the same result."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import structlog

from everstep.wire.events import UNFIT, EventKind
from service.model.rows import EventRow
from service.model.run_rows import RunRow
from service.projections import changes
from service.projections.changes import Changes

T = TypeVar("T")
logger = structlog.get_logger(__name__)


def project(run: RunRow, event: EventRow) -> Changes:
    """Return what ``event`` changes about ``run``; empty Changes for kinds that change nothing.

    Unknown kinds only become history, so that an older service can read a newer driver.
    """
    handler = _HANDLERS.get(event.kind)
    return handler(run, event) if handler else Changes()


_HANDLERS: Final[Mapping[str, Callable[[RunRow, EventRow], Changes]]] = {
    EventKind.ATTEMPT_STARTED: changes.attempt_started,
    EventKind.RESTORED: changes.restored,
    EventKind.TRAINING_STARTED: changes.training_started,
    EventKind.SNAPSHOTS: changes.snapshots,
    EventKind.METRICS: changes.metrics,
    EventKind.RANK_USE: changes.rank_use,
    EventKind.GPU_USE: changes.gpu_use,
    EventKind.EVALUATED: changes.evaluated,
    EventKind.EPOCH_COMPLETED: changes.epoch_completed,
    EventKind.CHECKPOINT_COMMITTED: changes.checkpoint_committed,
    EventKind.CHECKPOINT_DELETED: changes.checkpoint_gone,
    EventKind.CHECKPOINT_CORRUPT: changes.checkpoint_gone,
    EventKind.CHECKPOINT_FAILED: changes.checkpoint_failed,
    EventKind.FAILURE: changes.failure,
    EventKind.RECOVERED: changes.recovered,
    EventKind.WAITING: changes.waiting,
    EventKind.ATTEMPT_ENDED: changes.attempt_ended,
    EventKind.REPLAY_COMPARED: changes.compared,
    EventKind.FINISHED: changes.finished,
}


# ---------------------------------------------------------------- fitting

# Check that an event's changes fit the run's row. User code can write anything into the journal
# of its run. A row with wrong types would break every reader of it, such as the reconciler.

_MOST_UNFIT: Final = 4
"""Events that are left out one by one."""
_MOST_SEARCHED: Final = 2000
"""Events among which one that does not fit is searched for by many folds."""


def folded(fold: Callable[[list[EventRow]], T], rows: Iterable[EventRow]) -> T:
    """Return what ``fold`` makes of these events, without those that do not fit.

    Every page and answer that is made of a run's history comes from here. Left out are events that
    do not fit alone, and a few that do not fit those before them; if there are more, all are.
    """
    left = list(rows)
    with suppress(*UNFIT):
        return fold(left)
    left = [row for row in left if _fits(fold, [row])]
    for _ in range(_MOST_UNFIT):
        with suppress(*UNFIT):
            return fold(left)
        if len(left) > _MOST_SEARCHED:
            break
        places = range(1, len(left) + 1)
        first = bisect_left(places, True, key=lambda end: not _fits(fold, left[:end]))
        logger.warning("event_left_out", kind=left[first].kind, seq=left[first].seq)
        del left[first]
    with suppress(*UNFIT):
        return fold(left)
    logger.error("history_left_out", events=len(left))
    return fold([])


def _fits(fold: Callable[[list[EventRow]], object], rows: list[EventRow]) -> bool:
    try:
        fold(rows)
    except UNFIT:
        return False
    return True


_MOST: Final = 2**31 - 1

_MOST_TEXT_CHARS: Final = 100_000

_MOST_WORKERS: Final = 100_000


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT_CHARS


def _are_workers(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > _MOST_WORKERS:
        return False
    return all(
        isinstance(each, dict)
        and _is_text(each.get("node_id"))
        and _is_count(each.get("rank"))
        and all(item is None or _is_text(item) or _is_number(item) for item in each.values())
        for each in value
    )


def _is_checkpoint(value: Any) -> bool:
    return _is_text(value["name"]) and _is_count(value["step"]) and 0 <= value["size_bytes"] < 2**63


def _optional(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


_FITS: Final[Mapping[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("attempt", "restarts", "step", "epoch", "steps_lost_at_restore"), _is_count),
    **dict.fromkeys(("total_steps", "steps_per_epoch", "world_size"), _optional(_is_count)),
    "steps_lost": lambda value: type(value) is int and abs(value) <= _MOST,
    "workers": _are_workers,
    "snapshots": _optional(lambda value: _is_text(value) and len(value) <= 16),
    "replay_of": lambda value: _is_text(value["run_id"]) and _is_text(value["message"]),
    "chain": _optional(lambda value: _is_text(value) and len(value) <= 64),
    **dict.fromkeys(("guarantee", "reason_code", "reason_message"), _optional(_is_text)),
    "started_at": _is_number,
    "redone_s": _optional(_is_number),
    "metrics": lambda value: all(
        _is_text(name) and type(each) in (int, float) for name, each in value.items()
    ),
    "best": _optional(
        lambda value: (
            _is_text(value["metric"]) and _is_number(value["value"]) and _is_count(value["step"])
        )
    ),
    "latest_checkpoint": _optional(_is_checkpoint),
    "recent_checkpoints": lambda value: all(map(_is_checkpoint, value)),
}


def checked(changes: Changes) -> Changes:
    """Return the changes. Raises ValueError if one does not fit its column."""
    for name, value in changes.columns.items():
        fits = _FITS.get(name)
        if fits is not None and not fits(value):
            raise ValueError(f"{name} cannot be {str(value)[:200]!r}")
    for point in changes.points:
        if (
            not _is_count(point.step)
            or not _is_number(point.at)
            or not (point.value is None or type(point.value) in (int, float))
        ):
            raise ValueError(
                f"{point.name[:100]!r} has a point that is not a step, a time and a number"
            )
    return changes
