"""Which nodes want more idle workers, so that the next run, or the next driver, need not wait for Python and torch to start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from service.embedded.note import NodeNote

SETTLE_S = 3.0
"""Idle workers are missed for so long before others are started: those who took them are just starting, and need the CPU."""
ASK_AGAIN_S = 30.0
"""A worker that was asked for may take so long to import everything."""
CALM_S = 60.0
"""While ranks train, what only the next run would need is put off for so long: its start would take CPU from theirs."""
IDLE_TITLE = "ray::IDLE"
RANK_TITLE = "ray::EverstepTrainWorker"


class Workers(NamedTuple):
    """Worker processes of this machine."""

    idle: Mapping[int, int]
    """How many are idle, by raylet pid."""
    training: bool
    """Whether any is a rank."""


@dataclass
class _Missed:
    since: float
    asked_at: float = float("-inf")


class IdlePool:
    """Remembers since when each node has been short of idle workers.

    Args:
        targets: How many idle workers a node should have.
        count: What worker processes there are.
    """

    def __init__(
        self,
        targets: Callable[[NodeNote], int],
        count: Callable[[Sequence[NodeNote]], Workers] | None = None,
    ) -> None:
        self._targets = targets
        self._count = count or count_workers
        self._missed: dict[str, _Missed] = {}
        self._known: set[str] = set()

    def wanted(self, nodes: Sequence[NodeNote], now: float) -> list[tuple[NodeNote, int]]:
        """Nodes to start idle workers on, and how many; a node that is named is not named again before they can be there.

        Args:
            nodes: Nodes that live.
            now: Monotonic seconds.
        """
        idle, training = self._count(nodes)
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
            if missed is None or now - missed.asked_at < ASK_AGAIN_S or now - missed.since < SETTLE_S:
                continue
            count = short[node.node_id]
            if training and now - missed.since < CALM_S:
                # One on the head, for the actor over which the next attempt's ranks report; a run's own spares are on the others.
                count = 1 - idle.get(node.raylet_pid, 0) if node.is_head else 0
            if count > 0:
                missed.asked_at = now
                wanted.append((node, count))
        return wanted


def count_workers(nodes: Sequence[NodeNote]) -> Workers:
    """Children of the nodes' raylets by the titles that Ray gives them. Those that are still importing have none yet."""
    idle = {node.raylet_pid: 0 for node in nodes}
    training = False
    for process in psutil.process_iter(["ppid", "cmdline"]):
        parent, title = process.info["ppid"], process.info["cmdline"]
        if parent in idle and title:
            idle[parent] += title[0].startswith(IDLE_TITLE)
            training = training or title[0].startswith(RANK_TITLE)
    return Workers(idle, training)
