"""Divide the micro-batches of a global batch among the ranks of an attempt: evenly, or in
proportion to their measured speed (``scaling.shares``).

The rule is pure. Its input are times that every rank has of all ranks, since they travel with the
reports of a step. So all ranks plan the same, at the same step, and meet for nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from statistics import median
from typing import TypeGuard

MIN_GAIN = 0.05
"""Steps must become shorter by at least this share of their time, or the plan stays."""
PARTS = 4
"""Consecutive parts of a window in each of which they must. A rank that is slow only for a while,
as it writes a checkpoint, is not slow in all of them."""
MIN_STEPS = 32
"""Fewest steps in a window, …"""
WINDOW_S = 10.0
"""… and shortest time in seconds of their slowest ranks; twice as long after each change, …"""
MOST_WINDOW_S = 600.0
"""… up to this. So whatever speeds do, changes become rare."""
LOOK_STEPS = 1000
"""Steps after which a plan that fitted is looked at again, if no epoch ends before."""
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


def replanned(count: int, present: Costs, rows: Sequence[Sequence[float]]) -> Costs | None:
    """Return the costs to divide by from now on; None to leave ``present``.

    The typical costs of the window give another plan. It is taken only if the recorded steps would
    have been shorter with it, by ``MIN_GAIN`` in every part. So of two plans none follows the other
    and again, unless speeds have changed: a step's real time falls with each change.

    Args:
        count: micro-batches of a full global batch.
        rows: seconds of every rank in steps of the present plan; at least ``PARTS`` steps.
    """
    now = divided(count, present or (1.0,) * len(rows[0]))
    found = tuple(
        median(times) / own for times, own in zip(zip(*rows, strict=True), now, strict=True)
    )
    planned = divided(count, found)
    if planned == now:
        return None
    ends = [len(rows) * part // PARTS for part in range(PARTS + 1)]
    factors = [then / own for then, own in zip(planned, now, strict=True)]
    for begin, end in pairwise(ends):
        part = rows[begin:end]
        took_s = math.fsum(map(max, part))
        would_s = math.fsum(
            max(own_s * factor for own_s, factor in zip(row, factors, strict=True)) for row in part
        )
        if would_s > (1 - MIN_GAIN) * took_s:
            return None
    return found


class SharePlanner:
    """Follow the speed of an attempt's ranks, and plan their shares: when the attempt begins, once
    they are measured, and after an epoch or ``LOOK_STEPS`` steps. Every rank has one.

    Args:
        division: that the attempt's sampler follows.
        count: micro-batches of a full global batch; more than there are ranks.
        known: seconds of a micro-batch as earlier attempts have measured them, by rank; None for a
            rank that is new.
    """

    def __init__(self, division: Division, count: int, known: Sequence[float | None]) -> None:
        self._division, self._count = division, count
        self._world_size = len(known)
        self._rows = list[tuple[float, ...]]()
        """Of the present window, as are the next three."""
        self._num_steps, self._every, self._took_s = 0, 1, 0.0
        self._window_s = WINDOW_S
        self._is_settled = False
        """Whether the last look left the plan as it was."""
        self._skips = 0
        self.measured = _completed(known)
        """Seconds of a micro-batch on each rank, as last measured; empty if no rank is."""
        if self.measured:
            even = divided(count, (1.0,) * self._world_size)
            row = [cost * own for cost, own in zip(self.measured, even, strict=True)]
            division.costs = replanned(count, (), [row] * PARTS) or ()

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the micro-batches of each rank in a full global batch."""
        return divided(self._count, self._division.costs or (1.0,) * self._world_size)

    def note(self, own_s: Sequence[float]) -> None:
        """Add one step: every rank's own seconds. A step counts only if all ranks are measured."""
        if self._skips:
            self._skips -= 1
        elif all(map(_is_sound, own_s)):
            self._took_s += max(own_s)
            if self._num_steps % self._every == 0:
                self._rows.append(tuple(own_s))
            self._num_steps += 1
            if len(self._rows) == _MOST_ROWS:
                self._rows, self._every = self._rows[::2], 2 * self._every

    def look(self, *, ends_epoch: bool) -> bool:
        """Plan anew if that is due. Return whether the plan changed. The next row is then still one
        of the plan before."""
        is_due = not self._is_settled or ends_epoch or self._num_steps >= LOOK_STEPS
        if not is_due or self._num_steps < MIN_STEPS or self._took_s < self._window_s:
            return False
        rows, now = self._rows, self.counts
        self.measured = tuple(
            median(times) / own for times, own in zip(zip(*rows, strict=True), now, strict=True)
        )
        costs = replanned(self._count, self._division.costs, rows)
        self._is_settled = costs is None
        self._rows, self._num_steps, self._every, self._took_s = [], 0, 1, 0.0
        if costs is None:
            return False
        self._division.costs, self._skips = costs, 1
        self._window_s = min(MOST_WINDOW_S, 2 * self._window_s)
        return True


def _completed(known: Sequence[float | None]) -> Costs:
    """Return the cost of each rank: of one that nobody has measured the median of the others; empty
    if none is measured."""
    sound = [each for each in known if _is_sound(each)]
    return tuple(each if _is_sound(each) else median(sound) for each in known) if sound else ()


def _is_sound(seconds: float | None) -> TypeGuard[float]:
    return seconds is not None and 0 < seconds < math.inf
