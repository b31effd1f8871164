"""Find the rank that the others wait for. Rank 0 aggregates every rank's own time by step, and
reports a rank that stays slow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from everstep.wire.events import EventKind

WINDOW_S = 5.0
"""Shortest time in seconds over which steps are collected for one comparison."""
WINDOW_STEPS = 20
"""Fewest steps in one comparison."""
PERSISTS = 3
"""Consecutive windows for which a rank must be slow, or no longer slow, before this is reported. A
rank that is busy for a moment is not a straggler."""
SLOW_RATIO = 1.15
"""A straggler takes at least this many times as long as its peers for the same work, …"""
SLOW_S = 0.003
"""… and is slower by more than this many seconds in a step."""
REPORT_EVERY_S = 60.0
"""Interval in seconds between reports of every rank's times while nothing changes."""
_STEPS_KEPT = 256

Emit = Callable[[EventKind, dict[str, Any]], None]


class StragglerWatch:
    """Compare every rank's own seconds in each step. Only rank 0 has a StragglerWatch.

    Ranks are compared by their time for one micro-batch, since their shares of a global batch may
    differ by one. Medians are compared, so that an occasional checkpoint or evaluation does not
    make a rank a straggler.
    """

    def __init__(
        self,
        emit: Emit,
        node_ids: Sequence[str],
        shares: Sequence[int],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with no rank marked as slow.

        Args:
            emit: receives ``rank_times`` and ``straggler`` events.
            node_ids: the node of each rank.
            shares: micro-batches of each rank in a full global batch.
            monotonic: returns seconds on a monotonic clock.
        """
        self._emit = emit
        self._node_ids = tuple(node_ids)
        self._shares = tuple(max(1, share) for share in shares)
        self._monotonic = monotonic
        self._window: deque[tuple[float, ...]] = deque(maxlen=_STEPS_KEPT)
        self._steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._window_began: float | None = None
        self._reported_at = float("-inf")
        self._in_a_row = [0] * len(self._node_ids)
        self._slow = [False] * len(self._node_ids)

    def note(self, step: int, own_s: Sequence[float], step_s: float) -> None:
        """Add one step: every rank's own seconds (0 if unknown), and the seconds of the whole
        step."""
        now = self._monotonic()
        if self._window_began is None:
            self._window_began = now
        if all(own_s):
            self._window.append(tuple(own_s))
            self._steps_s.append(step_s)
        if len(self._window) < WINDOW_STEPS or now - self._window_began < WINDOW_S:
            return
        own = [median(times) for times in zip(*self._window, strict=True)]
        typical_s = median(self._steps_s)
        self._window.clear()
        self._steps_s.clear()
        self._window_began = now
        changed = self._compare(step, own)
        if changed or now - self._reported_at >= REPORT_EVERY_S:
            self._reported_at = now
            self._emit(
                EventKind.RANK_TIMES,
                {"step": step, "step_s": round(typical_s, 6), "ranks": self._rows(own, typical_s)},
            )

    def _rows(self, own: Sequence[float], step_s: float) -> list[dict[str, Any]]:
        return [
            {
                "rank": rank,
                "node_id": self._node_ids[rank],
                "micro_batches": self._shares[rank],
                "own_s": round(seconds, 6),
                "wait_s": round(max(0.0, step_s - seconds), 6),
                "skew": round(self._skew(own, rank), 3),
            }
            for rank, seconds in enumerate(own)
        ]

    def _skew(self, own: Sequence[float], rank: int) -> float:
        """Return this rank's time for a micro-batch divided by that of the other ranks."""
        return own[rank] / self._peers_s(own, rank)

    def _peers_s(self, own: Sequence[float], rank: int) -> float:
        """Return the seconds that a typical peer would need for this rank's share."""
        others = [
            seconds / share
            for peer, (seconds, share) in enumerate(zip(own, self._shares, strict=True))
            if peer != rank
        ]
        return max(median(others) * self._shares[rank], 1e-9)

    def _compare(self, step: int, own: Sequence[float]) -> bool:
        """Report ranks that have become slow, or are no longer slow. Return whether there were
        any."""
        changed = False
        for rank, seconds in enumerate(own):
            peers_s = self._peers_s(own, rank)
            slow = seconds > SLOW_RATIO * peers_s and seconds > peers_s + SLOW_S
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if slow != self._slow[rank] else 0
            if self._in_a_row[rank] < PERSISTS:
                continue
            self._slow[rank], self._in_a_row[rank], changed = slow, 0, True
            self._emit(
                EventKind.STRAGGLER,
                {
                    "rank": rank,
                    "node_id": self._node_ids[rank],
                    "step": step,
                    "slow": slow,
                    "own_s": round(seconds, 6),
                    "peers_s": round(peers_s, 6),
                    "skew": round(seconds / peers_s, 3),
                },
            )
        return changed
