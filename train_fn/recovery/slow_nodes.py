"""Decide when a run leaves a node because a rank is slow there. Pure: the caller has the clock.

A slow rank holds up all others. Somewhere else it may be as fast as they are, or not, if it is its
work that takes so long: then nothing moves any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from train_fn.recovery.sizing import NodeView

SLOW_RATIO = 1.5
"""A slow rank takes at least this many times as long as its peers for the same work."""
AWAY_S = 3600.0
"""Seconds for which a run stays away from a node that it has left, and for which nothing moves
where a move did not help."""
EVEN_LOOKS = 2
"""Looks at the times of all ranks, of one a minute, that must find no slow rank before the node
that was left is to blame."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that has held its peers up for a minute, as rank 0 has reported it."""

    rank: int
    node_id: str
    skew: float
    """How many times as long as its peers it takes for its share of a step."""


@dataclass(frozen=True)
class Speeds:
    """What is known of the ranks' speeds in one attempt."""

    slow: tuple[SlowRank, ...] = ()
    num_even: int = 0
    """Looks at the times of all ranks in a row, of one a minute, that found none slow."""


@dataclass(frozen=True)
class NodeMove:
    """A move away from a node. ``attempt`` is the one in which the rank was slow."""

    slow: SlowRank
    attempt: int
    stays: bool | None = None
    """Whether the slowness stayed with the node; None while nobody knows."""

    def facts(self) -> dict[str, Any]:
        """Return the data of its event."""
        return {**dataclasses.asdict(self.slow), "stays": self.stays}


class SlowNodes:
    """Remembers which nodes a run has left. One move at a time: the next one waits until it is
    known whether the last one helped.

    Args:
        moves: whether the run moves at all.
    """

    def __init__(self, *, moves: bool) -> None:
        self._moves = moves
        self._until: dict[str, float] = {}
        self._rests_until = float("-inf")
        self._open: NodeMove | None = None

    def leave(
        self, speeds: Speeds, attempt: int, now: float, has_room: Callable[[str], bool]
    ) -> NodeMove | None:
        """Return the move to make now, and count it as made; None if no rank is slow, or none may
        move.

        Args:
            attempt: the one that trains, whose speeds these are.
            now: monotonic seconds.
            has_room: returns whether all ranks fit on the cluster without a node.
        """
        waits = self._open is not None and self._open.slow.node_id in self.away(now)
        if not self._moves or waits or now < self._rests_until:
            return None
        for slow in sorted(speeds.slow, key=lambda each: -each.skew):
            if self._until.get(slow.node_id, now) <= now and has_room(slow.node_id):
                self._until[slow.node_id] = now + AWAY_S
                self._open = NodeMove(slow, attempt)
                return self._open
        return None

    def judge(self, speeds: Speeds, attempt: int, now: float) -> NodeMove | None:
        """Return the last move with what a later attempt shows about it, once; None as long as
        that shows nothing."""
        move = self._open
        if move is None or attempt <= move.attempt:
            return None
        follows = any(each.node_id != move.slow.node_id for each in speeds.slow)
        if not follows and speeds.num_even < EVEN_LOOKS:
            return None
        self._open = None
        if follows:
            self._rests_until = now + AWAY_S
        return dataclasses.replace(move, stays=not follows)

    def away(self, now: float) -> frozenset[str]:
        """Return the nodes that the run stays away from."""
        return frozenset(node for node, until in self._until.items() if now < until)

    def forgive(self, nodes: Collection[str]) -> None:
        """Use nodes again: a slow one is better than none."""
        for node in nodes:
            self._until.pop(node, None)

    def mark(self, nodes: Iterable[NodeView], now: float) -> tuple[NodeView, ...]:
        """Return the nodes, with those to stay away from as draining."""
        away = self.away(now)
        return tuple(
            dataclasses.replace(node, draining=True) if node.node_id in away else node
            for node in nodes
        )
