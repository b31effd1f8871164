"""Which nodes want more idle workers, so that the next run, or the next driver, need not wait for Python and torch to start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from service.embedded.note import NodeNote

SETTLE_S = 3.0
"""Idle workers are missed for so long before others are started: those who took them are just starting, and need the CPU."""
ASK_AGAIN_S = 30.0
"""A worker that was asked for may take so long to import everything."""
IDLE_TITLE = "ray::IDLE"


@dataclass
class _Missed:
    since: float
    asked_at: float = float("-inf")


class IdlePool:
    """Remembers since when each node has been short of idle workers.

    Args:
        targets: How many idle workers a node should have.
        count_idle: Idle workers by raylet pid.
    """

    def __init__(
        self,
        targets: Callable[[NodeNote], int],
        count_idle: Callable[[Sequence[NodeNote]], Mapping[int, int]] | None = None,
    ) -> None:
        self._targets = targets
        self._count_idle = count_idle or count_idle_workers
        self._missed: dict[str, _Missed] = {}
        self._known: set[str] = set()

    def wanted(self, nodes: Sequence[NodeNote], now: float) -> list[tuple[NodeNote, int]]:
        """Nodes to start idle workers on, and how many; a node that is named is not named again before they can be there.

        Args:
            nodes: Nodes that live.
            now: Monotonic seconds.
        """
        idle = self._count_idle(nodes)
        short = {node.node_id: self._targets(node) - idle.get(node.raylet_pid, 0) for node in nodes}
        # On a node that has just come nobody took them, and nobody needs the CPU: there is nothing to wait for.
        since = {node_id: now if node_id in self._known else now - SETTLE_S for node_id in short}
        self._missed = {
            node_id: self._missed.get(node_id, _Missed(since[node_id])) for node_id, missing in short.items() if missing > 0
        }
        self._known = set(short)
        wanted = []
        for node in nodes:
            missed = self._missed.get(node.node_id)
            if missed is not None and now - missed.since >= SETTLE_S and now - missed.asked_at >= ASK_AGAIN_S:
                missed.asked_at = now
                wanted.append((node, short[node.node_id]))
        return wanted


def count_idle_workers(nodes: Sequence[NodeNote]) -> dict[int, int]:
    """Idle workers by raylet pid: children that Ray gave that title. Those that are still importing do not have it yet."""
    counts = {node.raylet_pid: 0 for node in nodes}
    for process in psutil.process_iter(["ppid", "cmdline"]):
        parent, title = process.info["ppid"], process.info["cmdline"]
        if parent in counts and title and title[0].startswith(IDLE_TITLE):
            counts[parent] += 1
    return counts
