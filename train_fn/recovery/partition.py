"""Exclude nodes that the head can reach but other nodes cannot.

A group whose ranks cannot all reach each other never starts. So each node tries to connect to the
others before the process group is created. Nodes that are cut off are excluded for a while, longer
each time.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from train_fn.recovery.sizing import NodeView

LONGEST_TIMES = 16
"""Longest exclusion, as a multiple of the first one."""


def nodes_to_exclude(unreached: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the nodes to exclude so that all others can reach each other.

    The node with the most broken pairs is excluded first. Ties go to the greatest id, so that the
    choice is the same each time.

    Args:
        unreached: For each node, the nodes that it could not reach.
    """
    pairs = {frozenset((node, other)) for node, others in unreached.items() for other in others}
    out: list[str] = []
    while pairs:
        broken = Counter(node for pair in pairs for node in pair)
        worst = max(broken, key=lambda node: (broken[node], node))
        out.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return out


class ExcludedNodes:
    """Remembers which nodes are excluded, and until when (monotonic seconds)."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._until: dict[str, float] = {}
        self._times: Counter[str] = Counter()

    def exclude(self, nodes: Iterable[str], now: float) -> None:
        """Exclude ``nodes`` for a while, starting at ``now``."""
        for node in nodes:
            self._until[node] = now + self._first_s * min(2.0 ** self._times[node], LONGEST_TIMES)
            self._times[node] += 1

    def mark(self, nodes: Iterable[NodeView], now: float) -> tuple[NodeView, ...]:
        """Return the nodes with excluded ones marked as cordoned."""
        return tuple(
            dataclasses.replace(node, cordoned=True)
            if self._until.get(node.node_id, now) > now
            else node
            for node in nodes
        )
