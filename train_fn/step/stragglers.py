"""Which rank the others wait for: every rank's own time by step, folded on rank 0, and told when
one stays slow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from everstep.wire.events import EventKind

WINDOW_S = 5.0
"""How long steps are gathered for one comparison."""
WINDOW_STEPS = 20
"""Fewest steps that are compared."""
PERSISTS = 3
"""So many windows in a row a rank must be slow, or not, before that is told: a busy moment is no
straggler."""
SLOW_RATIO = 1.15
"""A straggler takes so many times what its peers take for the same work,"""
SLOW_S = 0.003
"""and at least so much longer in a step."""
TELL_EVERY_S = 60.0
"""How often every rank's times are told while nothing changes."""
_STEPS_KEPT = 256

Emit = Callable[[EventKind, dict[str, Any]], None]


class StragglerWatch:
    """Takes every rank's own seconds of each step; rank 0 alone keeps one.

    Ranks are compared by their time for one micro-batch, because their shares of a global batch may
    differ by one. Medians: a checkpoint or an evaluation now and then makes nobody a straggler.
    """

    def __init__(
        self,
        emit: Emit,
        node_ids: Sequence[str],
        shares: Sequence[int],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            emit: Takes ``rank_times`` and ``straggler`` events.
            node_ids: Node of each rank.
            shares: Micro-batches that each rank has of a whole global batch.
            monotonic: Seconds.
        """
        self._emit = emit
        self._node_ids = tuple(node_ids)
        self._shares = tuple(max(1, share) for share in shares)
        self._monotonic = monotonic
        self._window: deque[tuple[float, ...]] = deque(maxlen=_STEPS_KEPT)
        self._steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._window_began: float | None = None
        self._told_at = float("-inf")
        self._in_a_row = [0] * len(self._node_ids)
        self._slow = [False] * len(self._node_ids)

    def note(self, step: int, own_s: Sequence[float], step_s: float) -> None:
        """Take one step: every rank's own seconds (0 for not known), and the seconds of the whole
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
        if changed or now - self._told_at >= TELL_EVERY_S:
            self._told_at = now
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
        """How many times what the other ranks take for a micro-batch this one takes."""
        return own[rank] / self._peers_s(own, rank)

    def _peers_s(self, own: Sequence[float], rank: int) -> float:
        """What a typical peer would take for this rank's share, in seconds."""
        others = [
            seconds / share
            for peer, (seconds, share) in enumerate(zip(own, self._shares, strict=True))
            if peer != rank
        ]
        return max(median(others) * self._shares[rank], 1e-9)

    def _compare(self, step: int, own: Sequence[float]) -> bool:
        """Tell of ranks that became slow for long enough, or are slow no more. Whether any did."""
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
