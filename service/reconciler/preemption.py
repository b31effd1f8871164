"""Preemption: which runs shrink or pause so that a run of a higher priority fits. Pure
functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from everstep.wire import RunStatus
from service.reconciler.capacity import Free, combined, fits, leaving, remove, restore
from service.reconciler.facts import RunFacts

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
