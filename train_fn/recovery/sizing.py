"""Compute how many ranks fit on the nodes that are available, and on which. Pure arithmetic."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from everstep.spec.sections import ScalingSpec

_TINY = 1e-6
"""Ray's resources are floats: three thirds of a GPU must count as one."""


@dataclass(frozen=True)
class NodeView:
    """The state of one node. ``total`` and ``available`` are Ray resources, as of the cluster's
    last report."""

    node_id: str
    ip: str
    port: int
    total: Mapping[str, float]
    available: Mapping[str, float]
    is_head: bool = False
    reachable: bool = True
    """Its raylet just accepted a connection. Ray may still list a node that did not."""
    silent: bool = False
    """Its host did not answer at all; a host that refuses a connection is not silent."""
    draining: bool = False
    drain_deadline: float | None = None
    """When a draining node will be taken away, in unix seconds; None if unknown."""
    cordoned: bool = False

    @property
    def usable(self) -> bool:
        return self.reachable and not self.draining and not self.cordoned


@dataclass(frozen=True)
class Fit:
    """How many ranks fit, at most ``max_workers``, and which resources are missing for
    ``min_workers``."""

    num_workers: int
    missing: dict[str, float] = field(default_factory=dict)


def fit_workers(
    nodes: Iterable[NodeView],
    held: Mapping[str, int],
    per_worker: Mapping[str, float],
    *,
    min_workers: int,
    max_workers: int,
    strategy: str,
) -> Fit:
    """Return how many ranks fit on usable nodes. Resources that this run holds count as free.

    Args:
        nodes: The cluster's nodes.
        held: This run's bundles on each node, by node id.
        per_worker: Ray resources of one rank.
        min_workers: Fewest ranks that the run needs.
        max_workers: Most ranks that it may use.
        strategy: Ray's placement strategy. STRICT_PACK puts all ranks on one node, STRICT_SPREAD
            one rank on each.
    """
    wanted = _wanted(per_worker)
    room = _room(nodes, held, wanted, max_workers).values()
    if strategy == "STRICT_PACK":
        count = max(room, default=0)
    elif strategy == "STRICT_SPREAD":
        count = sum(slots > 0 for slots in room)
    else:
        count = sum(room)
    count = min(count, max_workers)
    lacking = max(0, min_workers - count)
    return Fit(
        count, {name: amount * lacking for name, amount in wanted.items()} if lacking else {}
    )


def is_worth_growing(num_ranks: int, num_joining: int, pause_s: float, mtbf_s: float) -> bool:
    """Return whether the work that the joining ranks add until the next failure is at least what
    the others miss in their pause."""
    return num_joining > 0 and num_joining * mtbf_s >= num_ranks * pause_s


def _wanted(per_worker: Mapping[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in per_worker.items() if amount > 0}


def _room(
    nodes: Iterable[NodeView], held: Mapping[str, int], wanted: Mapping[str, float], most: int
) -> dict[str, int]:
    """Return how many ranks fit on each usable node, at most ``most``, by node id."""
    return {
        node.node_id: _slots(node, held.get(node.node_id, 0), wanted, most)
        for node in nodes
        if node.usable
    }


def _slots(node: NodeView, held: int, wanted: Mapping[str, float], most: int) -> int:
    if not wanted:
        return most
    free = {
        name: min(node.total.get(name, 0.0), node.available.get(name, 0.0) + held * amount)
        for name, amount in wanted.items()
    }
    return min(most, *(math.floor(free[name] / amount + _TINY) for name, amount in wanted.items()))


def choose_nodes(
    nodes: Iterable[NodeView],
    held: Mapping[str, int],
    per_worker: Mapping[str, float],
    *,
    num_workers: int,
    strategy: str,
) -> Counter[str] | None:
    """Return how many of ``num_workers`` ranks each usable node takes, by node id; None if they do
    not fit.

    Bundles that the run holds are used first, because they are available at once. The others follow
    Ray's placement strategy.
    """
    room = _room(nodes, held, _wanted(per_worker), num_workers)
    kept = {node: min(held.get(node, 0), slots) for node, slots in room.items()}
    if strategy == "STRICT_PACK":
        room = dict(
            [max(room.items(), key=lambda item: (item[1] >= num_workers, kept[item[0]], item[1]))]
            if room
            else ()
        )
    elif strategy == "STRICT_SPREAD":
        room = {node: min(slots, 1) for node, slots in room.items()}
    if sum(room.values()) < num_workers:
        return None
    together = 1 if strategy in ("PACK", "STRICT_PACK") else -1
    chosen: Counter[str] = Counter()

    def place(order: int, node: str) -> tuple[bool, int, int, int, str]:
        """Return a sort key: the node that takes the next rank has the smallest. Taking it changes
        only that node's key."""
        return (chosen[node] >= kept[node], -together * chosen[node], -room[node], order, node)

    waiting = [place(order, node) for order, node in enumerate(room) if room[node] > 0]
    heapq.heapify(waiting)
    for _ in range(num_workers):
        *_, order, node = waiting[0]
        chosen[node] += 1
        if chosen[node] < room[node]:
            heapq.heapreplace(waiting, place(order, node))
        else:
            heapq.heappop(waiting)
    return chosen


# ---------------------------------------------------------------- resources

# The Ray resources of one rank.


def use_gpu(spec: ScalingSpec, cluster: Mapping[str, float]) -> bool:
    """Return whether ranks run on GPUs. ``auto`` means yes if the cluster has enough for
    ``min_workers``."""
    if spec.use_gpu != "auto":
        return spec.use_gpu
    return cluster.get("GPU", 0.0) >= spec.min_workers * spec.resources_per_worker.get("GPU", 1.0)


def worker_resources(spec: ScalingSpec, on_gpu: bool) -> dict[str, float]:
    """Return the Ray resources of one rank."""
    resources = dict(spec.resources_per_worker)
    if on_gpu:
        resources.setdefault("GPU", 1.0)
    return resources
