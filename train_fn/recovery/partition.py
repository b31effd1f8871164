"""Nodes that the head reaches and other nodes do not: a partition that only those inside it can
see.

A group whose ranks cannot all reach each other never begins. So each node tries the others before
the process group is made, and the fewest nodes that stand apart are left out for a while, longer
each time that they are found apart again.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from train_fn.recovery.sizing import NodeView

LONGEST_TIMES = 16
"""The longest time that a node is left out, as a multiple of the first."""


def nodes_apart(unreached: Mapping[str, Iterable[str]]) -> list[str]:
    """Nodes to leave out so that those left all reach each other; ``unreached`` tells for each node
    whom it did not reach.

    The node with most broken pairs goes first; of equals the one with the greatest id, so that the
    choice is the same each time.
    """
    pairs = {frozenset((node, other)) for node, others in unreached.items() for other in others}
    out: list[str] = []
    while pairs:
        broken = Counter(node for pair in pairs for node in pair)
        worst = max(broken, key=lambda node: (broken[node], node))
        out.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return out


class Apart:
    """Which nodes are left out now. Times are monotonic seconds."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._until: dict[str, float] = {}
        self._times: Counter[str] = Counter()

    def leave_out(self, nodes: Iterable[str], now: float) -> None:
        """Give ``nodes`` no rank for a while from ``now`` on."""
        for node in nodes:
            self._until[node] = now + self._first_s * min(2.0 ** self._times[node], LONGEST_TIMES)
            self._times[node] += 1

    def mark(self, nodes: Iterable[NodeView], now: float) -> tuple[NodeView, ...]:
        """The same nodes; those that are left out take no new rank."""
        return tuple(
            dataclasses.replace(node, cordoned=True)
            if self._until.get(node.node_id, now) > now
            else node
            for node in nodes
        )
