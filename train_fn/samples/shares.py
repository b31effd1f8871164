"""Divide the micro-batches of a global batch among the ranks of an attempt: evenly, or in
proportion to their measured speed (``scaling.shares``).

The rule is pure. Its input are times that every rank has of all ranks, since they travel with the
reports of a step. So all ranks plan the same, at the same step, and meet for nothing.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import median
from typing import TypeGuard

MIN_GAIN = 0.05
"""Steps must become shorter by at least this share of their time, or the plan stays."""
PARTS = 4
"""A window has so many parts, and steps must become shorter in each of them. A rank that is slow
for a while, as when it writes a checkpoint, is not slow in all."""
MIN_STEPS = 32
"""Fewest steps in a window, …"""
WINDOW_S = 10.0
"""… and shortest time in seconds of their slowest ranks; twice as long after each change, …"""
MOST_WINDOW_S = 600.0
"""… up to this. So whatever speeds do, changes become rare."""
_MOST_ROWS = 256
"""Steps of a window that are kept: of a longer one every second, every fourth …"""

Costs = tuple[float, ...]
"""Seconds of a micro-batch, by rank. Empty for equal shares."""


class Division:
    """Hold how one attempt divides its micro-batches. All ranks change ``costs`` between the same
    two steps."""

    def __init__(self) -> None:
        self.costs: Costs = ()

    def of(self, count: int, world_size: int) -> tuple[range, ...] | None:
        """Return each rank's contiguous share of ``count`` micro-batches; None for equal ones, and
        for a group of another size."""
        return _ranges(count, self.costs) if len(self.costs) == world_size else None


@lru_cache(maxsize=256)
def _ranges(count: int, costs: Costs) -> tuple[range, ...]:
    ranges, start = list[range](), 0
    for each in divided(count, costs):
        ranges.append(range(start, start + each))
        start += each
    return tuple(ranges)


def divided(count: int, costs: Costs) -> tuple[int, ...]:
    """Return how many of ``count`` micro-batches each rank takes, so that the last one to finish
    does so as early as possible. Lower ranks take more where it makes no difference.

    Each rank takes at least one, or nobody would learn its speed; of fewer micro-batches than ranks
    the lower ranks take one each. With more micro-batches no rank takes fewer.
    """
    world_size = len(costs)
    if count <= world_size:
        return tuple(int(rank < count) for rank in range(world_size))
    # What all ranks finish in this time is theirs in any case. The rest goes one by one.
    within_s = (count - world_size) / math.fsum(1 / cost for cost in costs)
    counts = [max(1, math.floor(within_s / cost)) for cost in costs]
    ends = [((counts[rank] + 1) * cost, rank) for rank, cost in enumerate(costs)]
    heapq.heapify(ends)
    for _ in range(count - sum(counts)):
        _, rank = ends[0]
        counts[rank] += 1
        heapq.heapreplace(ends, ((counts[rank] + 1) * costs[rank], rank))
    return tuple(counts)


class SharePlanner:
    """Follow the speed of an attempt's ranks, and plan their shares: when the attempt begins, and
    after each window of steps. Every rank has one.

    Args:
        division: that the attempt's sampler follows.
        count: micro-batches of a full global batch; more than there are ranks.
        known: seconds of a micro-batch as earlier attempts have measured them, by rank; None for a
            rank that is new. It counts as the median of the others.
    """

    def __init__(self, division: Division, count: int, known: Sequence[float | None]) -> None:
        self._division, self._count = division, count
        self._world_size = len(known)
        self._window_s, self._skips = WINDOW_S, 0
        self._rows = list[tuple[float, ...]]()
        self._num_steps, self._every, self._took_s = 0, 1, 0.0
        sound = [each for each in known if _is_sound(each)]
        if sound:
            division.costs = tuple(each if _is_sound(each) else median(sound) for each in known)

    @property
    def costs(self) -> Costs:
        """Return the costs by which the ranks divide; empty while shares are equal."""
        return self._division.costs

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the micro-batches of each rank in a full global batch."""
        return divided(self._count, self.costs or (1.0,) * self._world_size)

    def note(self, own_s: Sequence[float]) -> bool:
        """Add one step: every rank's own seconds. A step counts only if all ranks are measured.

        At the end of a window, plan anew. Return whether the plan changed. The next row is then
        still one of the plan before.
        """
        if self._skips or not all(map(_is_sound, own_s)):
            self._skips = 0
            return False
        self._took_s += max(own_s)
        if self._num_steps % self._every == 0:
            self._rows.append(tuple(own_s))
        self._num_steps += 1
        if len(self._rows) == _MOST_ROWS:
            self._rows, self._every = self._rows[::2], 2 * self._every
        if self._num_steps < MIN_STEPS or self._took_s < self._window_s:
            return False
        rows, now = self._rows, self.counts
        self._rows, self._num_steps, self._every, self._took_s = [], 0, 1, 0.0
        typical_s = (median(times) for times in zip(*rows, strict=True))
        found = tuple(took_s / own for took_s, own in zip(typical_s, now, strict=True))
        if not is_shorter(rows, now, divided(self._count, found)):
            return False
        self._division.costs, self._skips = found, 1
        self._window_s = min(MOST_WINDOW_S, 2 * self._window_s)
        return True


def is_shorter(rows: Sequence[Sequence[float]], now: Sequence[int], then: Sequence[int]) -> bool:
    """Return whether the steps of a window would have been shorter with other shares, by
    ``MIN_GAIN`` in every part. So of two plans none follows the other and again, unless speeds have
    changed: a step's real time falls with each change.

    Args:
        rows: seconds of every rank in each step; at least ``PARTS`` steps.
        now: micro-batches of each rank in these steps.
        then: those that it would have.
    """
    factors = [other / own for other, own in zip(then, now, strict=True)]
    took_s = [max(row) for row in rows]
    would_s = [max(map(operator.mul, row, factors)) for row in rows]
    ends = [len(rows) * part // PARTS for part in range(PARTS + 1)]
    return all(
        sum(would_s[begin:end]) <= (1 - MIN_GAIN) * sum(took_s[begin:end])
        for begin, end in pairwise(ends)
    )


def _is_sound(seconds: float | None) -> TypeGuard[float]:
    return seconds is not None and 0 < seconds < math.inf
