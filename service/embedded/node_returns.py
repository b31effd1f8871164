"""When dead nodes of the embedded cluster are started again: soon, and later if one keeps dying."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final

RETRY_S: Final = 10.0
"""Seconds until a node that did not start is tried again."""
LONGEST_S: Final = 300.0
"""Longest pause before a node that keeps dying."""
FORGET_S: Final = 600.0
"""A death counts for this long."""


class NodeReturns:
    """The slots without a node, and when each gets another one.

    Args:
        return_s: Seconds after a first death; each further one within ``FORGET_S`` doubles them. 0
            starts no dead node again.
        now: Seconds since some fixed time.
        clock: Unix seconds, for people.
    """

    def __init__(
        self,
        return_s: float,
        now: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._return_s = return_s
        self._now = now
        self._clock = clock
        self._deaths: defaultdict[int, list[float]] = defaultdict(list)
        self._due: dict[int, float] = {}

    def died(self, slot: int) -> float | None:
        """Record a death; return the seconds until the node is started again, None for never."""
        now = self._now()
        recent = [at for at in self._deaths[slot] if now - at < FORGET_S]
        self._deaths[slot] = [*recent, now]
        if not self._return_s:
            return None
        wait_s = min(max(LONGEST_S, self._return_s), self._return_s * 2.0 ** min(len(recent), 30))
        self._due[slot] = now + wait_s
        return wait_s

    def tried(self, slot: int, *, is_up: bool) -> None:
        """Record a try to start a node."""
        if is_up:
            self._due.pop(slot, None)
        else:
            self._due[slot] = self._now() + RETRY_S

    def due(self) -> list[int]:
        """Return the slots whose time has come."""
        now = self._now()
        return sorted(slot for slot, at in self._due.items() if at <= now)

    def next_in_s(self) -> float:
        """Return the seconds until the next slot is due; infinity for none."""
        return max(0.0, min(self._due.values(), default=float("inf")) - self._now())

    def at(self) -> tuple[float, ...]:
        """Return when nodes are started again, in unix seconds, soonest first."""
        past = self._clock() - self._now()
        return tuple(sorted(round(past + at, 1) for at in self._due.values()))
