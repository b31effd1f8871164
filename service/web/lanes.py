"""What every rank did over time, from a run's history: one lane per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from everstep.wire import Failure, RunStatus, Verdict
from everstep.wire.events import EventKind
from service.model.rows import EventRow

KINDS: Final = frozenset(
    {
        EventKind.STATUS,
        EventKind.SUBMISSION_STARTED,
        EventKind.ATTEMPT_STARTED,
        EventKind.TRAINING_STARTED,
        EventKind.FAILURE,
        EventKind.ATTEMPT_ENDED,
        EventKind.FINISHED,
    }
)
MOST_RANKS: Final = 64
MOST_SEGMENTS: Final = 4000

Activity = Literal["starting", "training", "waiting"]
ACTIVITY_WORDS: Final[dict[Activity, str]] = {
    "starting": "starting",
    "training": "training",
    "waiting": "stopped by a failure, not yet detected",
}


@dataclass(frozen=True)
class Segment:
    """What a rank did from ``start`` to ``end`` (unix seconds)."""

    activity: Activity
    start: float
    end: float
    attempt: int
    node_id: str


@dataclass(frozen=True)
class Fault:
    """A failure of which this rank was the first."""

    at: float
    verdict: Verdict


@dataclass
class Lane:
    """The time of one rank."""

    rank: int
    segments: list[Segment] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


@dataclass(frozen=True)
class Lanes:
    """Lanes over a span of time (unix seconds)."""

    start: float
    end: float
    lanes: tuple[Lane, ...]
    num_ranks_left_out: int
    num_attempts_left_out: int

    def position(self, at: float) -> float:
        """Return a time as percent of the way from ``start`` to ``end``."""
        return (
            0.0
            if self.end <= self.start
            else max(0.0, min(100.0, 100 * (at - self.start) / (self.end - self.start)))
        )

    def width(self, segment: Segment) -> float:
        """Return the width in percent, at least enough to be visible."""
        return max(0.15, self.position(segment.end) - self.position(segment.start))


@dataclass
class _Attempt:
    """The current worker group."""

    number: int
    started_at: float
    workers: Sequence[dict[str, Any]]
    trained_at: float | None = None
    stopped_at: float | None = None


def lanes(events: Iterable[EventRow], now: float) -> Lanes | None:
    """Return a lane for each rank that ever ran; None before the first attempt.

    Args:
        events: history with the kinds in KINDS.
        now: unix seconds; end of a group that is still running.
    """
    found: dict[int, Lane] = {}
    current: _Attempt | None = None
    numbers: list[int] = []
    last = now
    for event in events:
        if event.kind == EventKind.ATTEMPT_STARTED:
            _close(found, current, event.at)
            current = _Attempt(event.attempt, event.at, event.data.get("workers") or ())
            numbers.append(event.attempt)
        elif current is not None:
            _note(found, current, event)
            if _ends(event):
                _close(found, current, event.at)
                current, last = None, event.at
    if not numbers:
        return None
    if current is not None:
        _close(found, current, now)
        last = now
    return _framed(found, numbers, last)


def _note(found: dict[int, Lane], current: _Attempt, event: EventRow) -> None:
    """Apply an event to the current worker group."""
    if event.kind == EventKind.TRAINING_STARTED:
        current.trained_at = event.at
    elif event.kind == EventKind.FAILURE:
        current.stopped_at = max(current.started_at, event.at - (event.data.get("detect_s") or 0.0))
        rank = event.data.get("first_rank")
        if rank is not None:
            found.setdefault(int(rank), Lane(int(rank))).faults.append(
                Fault(current.stopped_at, Failure.of(event).verdict)
            )


def _ends(event: EventRow) -> bool:
    if event.kind == EventKind.STATUS:
        return event.data["to"] == RunStatus.PAUSED or RunStatus(event.data["to"]).terminal
    return event.kind in (EventKind.ATTEMPT_ENDED, EventKind.SUBMISSION_STARTED, EventKind.FINISHED)


def _close(found: dict[int, Lane], current: _Attempt | None, at: float) -> None:
    """Add the group's time, up to its end, to the lanes of its ranks."""
    if current is None:
        return
    end = max(at, current.started_at)
    stopped = min(current.stopped_at or end, end)
    trained = min(current.trained_at or stopped, stopped)
    parts: list[tuple[Activity, float, float]] = [
        ("starting", current.started_at, trained),
        ("training", trained, stopped),
        ("waiting", stopped, end),
    ]
    for worker in current.workers:
        lane = found.setdefault(int(worker["rank"]), Lane(int(worker["rank"])))
        for activity, start, until in parts:
            if until > start:
                lane.segments.append(
                    Segment(activity, start, until, current.number, str(worker["node_id"]))
                )


def _framed(found: dict[int, Lane], numbers: list[int], end: float) -> Lanes:
    """Return the lanes to draw: the lowest ranks and those that failed first, with as many of the
    newest attempts as fit."""
    ordered = sorted(found.values(), key=lambda lane: lane.rank)
    drawn = [lane for index, lane in enumerate(ordered) if index < MOST_RANKS or lane.faults]
    sizes = Counter(segment.attempt for lane in drawn for segment in lane.segments)
    shown: set[int] = set()
    room = MOST_SEGMENTS
    for number in reversed(numbers):
        room -= sizes[number]
        if room < 0 and shown:
            break
        shown.add(number)
    for lane in drawn:
        lane.segments = [segment for segment in lane.segments if segment.attempt in shown]
    start = min((segment.start for lane in drawn for segment in lane.segments), default=end)
    for lane in drawn:
        lane.faults = [fault for fault in lane.faults if fault.at >= start]
    return Lanes(
        start, max(end, start), tuple(drawn), len(ordered) - len(drawn), len(numbers) - len(shown)
    )
