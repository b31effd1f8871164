"""Arithmetic over nodes: how many ranks fit, and which nodes they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from everstep.spec.sections import MAX_WORKERS
from service.reconciler.facts import NodeFacts, RunFacts

_EPSILON: Final = 1e-6
_ACCELERATOR_SHARE: Final = 0.001

Free = list[dict[str, float]]
"""Free resources of each usable node, by its index."""


def most_workers(run: RunFacts) -> int:
    """Return how many ranks a run may have: what it requested, within the limit of its start."""
    return run.max_workers if run.workers_limit is None else min(run.max_workers, run.workers_limit)


def has_gpus(nodes: Sequence[NodeFacts]) -> bool:
    """Return whether a node has a GPU."""
    return any(node.resources.get("GPU", 0) >= 1 for node in nodes)


def needs_of(run: RunFacts, gpus: bool) -> dict[str, float]:
    """Return the resources of one rank, with a GPU if ``use_gpu`` and the cluster's ``gpus`` say
    so."""
    needs = dict(run.worker)
    if run.use_gpu is True or (run.use_gpu == "auto" and gpus):
        needs["GPU"] = max(1.0, needs.get("GPU", 0.0))
        if run.accelerator_type:
            needs[f"accelerator_type:{run.accelerator_type}"] = _ACCELERATOR_SHARE
    return needs


def fits(free: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many ranks fit on a node, at most MAX_WORKERS."""
    most = (
        min((free.get(name, 0.0) + _EPSILON) // amount, MAX_WORKERS)
        for name, amount in needs.items()
    )
    return max(0, int(min(most, default=0)))


def room(free: Sequence[Mapping[str, float]], needs: Mapping[str, float], strategy: str) -> int:
    """Return how many ranks fit on all nodes under a placement strategy."""
    return combined([fits(node, needs) for node in free], strategy)


def combined(by_node: Sequence[int], strategy: str) -> int:
    """Return how many ranks fit in all, from how many fit on each node."""
    if strategy == "STRICT_PACK":
        return max(by_node, default=0)
    if strategy == "STRICT_SPREAD":
        return sum(1 for count in by_node if count > 0)
    return sum(by_node)


def take(free: Free, needs: Mapping[str, float], count: int, strategy: str) -> list[int]:
    """Take the resources of up to ``count`` ranks out of ``free``, as Ray would place them.

    Returns the index of each rank's node.
    """
    if count <= 0:
        return []
    room_of = {index: slots for index, node in enumerate(free) if (slots := fits(node, needs)) > 0}
    fullest_first = strategy in ("PACK", "STRICT_PACK")
    placed: list[int] = []
    used: set[int] = set()
    while len(placed) < count:
        open_nodes = [index for index, slots in room_of.items() if slots > 0]
        if strategy == "STRICT_SPREAD":
            open_nodes = [index for index in open_nodes if index not in used]
        elif strategy == "STRICT_PACK" and used:
            open_nodes = [index for index in open_nodes if index in used]
        if not open_nodes:
            break
        chosen = max(
            open_nodes, key=lambda index: ((index in used) == fullest_first, room_of[index])
        )
        used.add(chosen)
        room_of[chosen] -= 1
        placed.append(chosen)
    remove(free, needs, placed)
    return placed


def leaving(placed: Sequence[int], kept: int, strategy: str) -> list[int]:
    """Return the nodes of the ranks that leave if ``kept`` of them stay.

    As in the run's driver, the strategy decides whether the ranks that stay are spread or packed.
    """
    counts, stay = Counter(placed), Counter[int]()
    together = 1 if strategy in ("PACK", "STRICT_PACK") else -1
    for _ in range(min(kept, len(placed))):
        open_nodes = [index for index in counts if stay[index] < counts[index]]
        stay[
            max(open_nodes, key=lambda index: (together * stay[index], counts[index], -index))
        ] += 1
    return sorted((counts - stay).elements())


def remove(free: Free, needs: Mapping[str, float], placed: Sequence[int]) -> None:
    """Take the resources of one rank from each of these nodes."""
    for index in placed:
        for name, amount in needs.items():
            free[index][name] = free[index].get(name, 0.0) - amount


def restore(free: Free, needs: Mapping[str, float], placed: Sequence[int]) -> None:
    """Give the resources of one rank back to each of these nodes."""
    for index in placed:
        for name, amount in needs.items():
            free[index][name] = free[index].get(name, 0.0) + amount


def amounts(resources: Mapping[str, float]) -> str:
    """Return resources in words, for example ``1 CPU + 1 GPU``."""
    return " + ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()))
