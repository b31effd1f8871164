"""Which queued runs may start: those whose min_workers fit beside what other runs hold, by priority, then by age."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from everstep.wire import Reason, ReasonCode
from service.reconciler.facts import NodeFacts, RunFacts

_EPSILON: Final = 1e-6
_ACCELERATOR_SHARE: Final = 0.001


@dataclass(frozen=True)
class Admission:
    """What became of a queued run: it starts, or ``reason`` says what it waits for."""

    run_id: str
    reason: Reason | None = None

    @property
    def starts(self) -> bool:
        return self.reason is None


def admit(queued: Sequence[RunFacts], holding: Sequence[RunFacts], nodes: Sequence[NodeFacts]) -> tuple[Admission, ...]:
    """Go through ``queued`` by priority and age; the first that has to wait holds back those behind it.

    A run that can never fit, or only with nodes that are marked now, holds nobody back. Without that order a large run would wait
    for ever behind small ones.

    Args:
        queued: Runs that wait for a start.
        holding: Runs that have a job: they hold what they use, and while that is not known, what they may use.
        nodes: Live nodes.
    """
    usable = [node for node in nodes if node.mark is None]
    free = [dict(node.resources) for node in usable]
    for run in holding:
        _take(free, _needs(run, nodes), _num_on_usable(run, nodes), run.placement_strategy)
    admissions, blocker = [], None
    for run in sorted(queued, key=lambda run: (-run.priority, run.created_at, run.id)):
        needs = _needs(run, nodes)
        room = _room([node.resources for node in nodes], needs, run.placement_strategy)
        if room < run.min_workers:
            admissions.append(Admission(run.id, _infeasible(run, needs, room)))
        elif (open_room := _room([node.resources for node in usable], needs, run.placement_strategy)) < run.min_workers:
            num_marked = len(nodes) - len(usable)
            why = f"{num_marked} of {len(nodes)} nodes are cordoned or draining, the others have room for {open_room} in all"
            admissions.append(Admission(run.id, _waiting(run, needs, why)))
        elif blocker is not None:
            admissions.append(Admission(run.id, _waiting(run, needs, f"run {blocker} is before it")))
        elif (now := _room(free, needs, run.placement_strategy)) < run.min_workers:
            blocker = run.id
            admissions.append(Admission(run.id, _waiting(run, needs, f"{now} fit now")))
        else:
            _take(free, needs, run.max_workers, run.placement_strategy)
            admissions.append(Admission(run.id))
    return tuple(admissions)


def _num_on_usable(run: RunFacts, nodes: Iterable[NodeFacts]) -> int:
    """Ranks that a run has, or may get, on nodes that are not marked: those on a cordoned node stay there, all others count."""
    cordoned = {node.node_id for node in nodes if node.mark == "cordoned"}
    return (run.world_size or run.max_workers) - sum(node_id in cordoned for node_id in run.node_ids)


def _needs(run: RunFacts, nodes: Iterable[NodeFacts]) -> dict[str, float]:
    """Resources of one rank, with the GPU that ``use_gpu`` means on this cluster."""
    needs = dict(run.worker)
    has_gpu = any(node.resources.get("GPU", 0) >= 1 for node in nodes)
    if run.use_gpu is True or (run.use_gpu == "auto" and has_gpu):
        needs["GPU"] = max(1.0, needs.get("GPU", 0.0))
        if run.accelerator_type:
            needs[f"accelerator_type:{run.accelerator_type}"] = _ACCELERATOR_SHARE
    return needs


def _fits(free: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """How many ranks a node has room for."""
    return min((int((free.get(name, 0.0) + _EPSILON) // amount) for name, amount in needs.items()), default=0)


def _room(free: Sequence[Mapping[str, float]], needs: Mapping[str, float], strategy: str) -> int:
    """How many ranks fit on all nodes under a placement strategy."""
    by_node = [_fits(node, needs) for node in free]
    if strategy == "STRICT_PACK":
        return max(by_node, default=0)
    if strategy == "STRICT_SPREAD":
        return sum(1 for count in by_node if count > 0)
    return sum(by_node)


def _take(free: list[dict[str, float]], needs: Mapping[str, float], count: int, strategy: str) -> None:
    """Take up to ``count`` ranks' resources out of ``free``, as Ray would place them."""
    used: set[int] = set()
    for _ in range(count):
        candidates = [index for index, node in enumerate(free) if _fits(node, needs) > 0]
        if strategy == "STRICT_SPREAD":
            candidates = [index for index in candidates if index not in used]
        elif strategy == "STRICT_PACK" and used:
            candidates = [index for index in candidates if index in used]
        if not candidates:
            return
        fullest_first = strategy in ("PACK", "STRICT_PACK")
        chosen = max(
            candidates, key=lambda index: (index in used if fullest_first else index not in used, _fits(free[index], needs))
        )
        used.add(chosen)
        for name, amount in needs.items():
            free[chosen][name] = free[chosen].get(name, 0.0) - amount


def _infeasible(run: RunFacts, needs: Mapping[str, float], room: int) -> Reason:
    missing = run.min_workers - room
    more = _amounts({name: amount * missing for name, amount in needs.items()})
    message = (
        f"min_workers {run.min_workers} of {_amounts(needs)} each ({run.placement_strategy}) can never fit: the whole cluster has "
        f"room for {room}; {more} more are missing. Add nodes, or lower scaling.min_workers or scaling.resources_per_worker."
    )
    return Reason(code=ReasonCode.INFEASIBLE, message=message)


def _waiting(run: RunFacts, needs: Mapping[str, float], why: str) -> Reason:
    message = f"waits for room for {run.min_workers} workers of {_amounts(needs)} each; {why}"
    return Reason(code=ReasonCode.WAITING_FOR_CAPACITY, message=message)


def _amounts(resources: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()))
