"""Arithmetic over nodes: how many ranks fit, and which nodes they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from everstep.spec.sections import MAX_WORKERS
from everstep.wire import RunStatus
from service.reconciler.facts import NodeState, RunFacts

_EPSILON: Final = 1e-6
_ACCELERATOR_SHARE: Final = 0.001

Free = list[dict[str, float]]
"""Free resources of each usable node, by its index."""


def most_workers(run: RunFacts) -> int:
    """Return how many ranks a run may have: what it requested, within the limit of its start."""
    return run.max_workers if run.workers_limit is None else min(run.max_workers, run.workers_limit)


def has_gpus(nodes: Sequence[NodeState]) -> bool:
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


# ---------------------------------------------------------------- preemption

# Preemption: which runs shrink or pause so that a run of a higher priority fits. Pure
# functions.

SHRINK_GRACE_S = 120.0
"""Longest time for ranks to save and leave when their run shrinks. Then it counts as not shrunk."""


@dataclass(frozen=True)
class Preemption:
    """A run that makes room for another one: it continues with at most ``to`` ranks, or, if that is
    None, is paused."""

    run_id: str
    by: str
    to: int | None = None


@dataclass(frozen=True)
class Holding:
    """What a run holds, and what of that it is giving back: the index of a usable node for each
    rank."""

    run: RunFacts
    needs: Mapping[str, float]
    nodes: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()

    @staticmethod
    def of(run: RunFacts, needs: Mapping[str, float], nodes: Sequence[int], now: float) -> Holding:
        """Return a run's holding: all ranks of a stopping run leave, and the excess of a shrinking
        one."""
        if run.status == RunStatus.STOPPING:
            return Holding(run, needs, tuple(nodes), tuple(nodes))
        too_many = (
            ()
            if run.shrunk_to is None or is_overdue(run, now)
            else leaving(nodes, run.shrunk_to, run.placement_strategy)
        )
        return Holding(run, needs, tuple(nodes), tuple(too_many))

    @property
    def staying(self) -> tuple[int, ...]:
        """The nodes of the ranks that stay."""
        rest = list(self.nodes)
        for index in self.leaving:
            rest.remove(index)
        return tuple(rest)


def is_overdue(run: RunFacts, now: float) -> bool:
    """Return whether a run has not shrunk within SHRINK_GRACE_S."""
    too_many = run.shrunk_to is not None and (run.world_size or 0) > run.shrunk_to
    return too_many and now - (run.shrunk_at or now) > SHRINK_GRACE_S


_Change = Callable[[Free, Mapping[str, float], Sequence[int]], None]


class _Space:
    """What a waiting run would find free."""

    def __init__(self, run: RunFacts, needs: Mapping[str, float], free: Free) -> None:
        self._run = run
        self._needs = needs
        self._free = [dict(node) for node in free]
        self._slots = [fits(node, needs) for node in self._free]

    def enough(self) -> bool:
        """Return whether the waiting run fits."""
        return combined(self._slots, self._run.placement_strategy) >= self._run.min_workers

    def give(self, held: Holding, nodes: Sequence[int]) -> None:
        """Count these ranks as gone."""
        self._change(restore, held, nodes)

    def take_back(self, held: Holding, nodes: Sequence[int]) -> None:
        """Count these ranks as present again."""
        self._change(remove, held, nodes)

    def _change(self, change: _Change, held: Holding, nodes: Sequence[int]) -> None:
        change(self._free, held.needs, nodes)
        for index in set(nodes):
            self._slots[index] = fits(self._free[index], self._needs)


def choose(
    waiting: RunFacts, needs: Mapping[str, float], coming: Free, held: Sequence[Holding], now: float
) -> tuple[Preemption, ...]:
    """Return the runs that make room for ``waiting``.

    None are needed if what is ``coming`` is enough, and none are chosen if nothing would be.
    Elastic runs of lower priority first shrink to their least size, the lowest and youngest before
    others. Only if that is not enough, the lowest and youngest are paused. Runs that turn out not
    to be needed are spared, as far as the order of choice allows.
    """
    space = _Space(waiting, needs, coming)
    lower = [
        one
        for one in held
        if one.run.priority < waiting.priority and one.run.status != RunStatus.STOPPING
    ]
    lower.sort(key=lambda one: (one.run.priority, -one.run.created_at, one.run.id))
    gone: dict[str, tuple[int, ...]] = {}
    shrunk: list[Holding] = []
    for one in lower:
        if space.enough():
            break
        ranks = (
            ()
            if is_overdue(one.run, now)
            else leaving(one.staying, one.run.min_workers, one.run.placement_strategy)
        )
        if ranks:
            gone[one.run.id] = tuple(ranks)
            space.give(one, ranks)
            shrunk.append(one)
    paused: list[tuple[Holding, tuple[int, ...]]] = []
    for one in lower:
        if space.enough():
            break
        rest = list(one.staying)
        for index in gone.get(one.run.id, ()):
            rest.remove(index)
        space.give(one, rest)
        paused.append((one, tuple(rest)))
    if not space.enough():
        return ()
    kept_paused = _needed(space, paused)
    named = {one.run.id for one in kept_paused}
    kept_shrunk = _needed(
        space, [(one, gone[one.run.id]) for one in shrunk if one.run.id not in named]
    )
    shrinks = tuple(Preemption(one.run.id, waiting.id, one.run.min_workers) for one in kept_shrunk)
    return shrinks + tuple(Preemption(one.run.id, waiting.id) for one in kept_paused)


def _needed(space: _Space, chosen: Sequence[tuple[Holding, tuple[int, ...]]]) -> list[Holding]:
    """Return the runs without which ``waiting`` does not fit.

    A later choice may have made an earlier one needless. The highest priority is spared first.
    """
    kept = []
    for one, ranks in reversed(chosen):
        space.take_back(one, ranks)
        if not space.enough():
            space.give(one, ranks)
            kept.append(one)
    return kept[::-1]
