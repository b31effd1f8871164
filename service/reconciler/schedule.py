"""The plan of the queue: which runs start, with how many ranks, and which runs make room. Pure
functions; see docs/scheduling.md.

- Order: by priority. Within a priority first the runs that have waited for ``PATIENCE_S``, by age,
  then the runs of the project that uses least, by age.
- A run starts if its ``min_workers`` fit, its project's quotas allow it, and it delays no run
  before it.
- Room is reserved for the first run that does not fit. A later one starts only on what that run
  does not need.
- A run that its project's quota holds back holds back later runs of that project, and of no other.
- If it makes room for the first run that does not fit, runs of lower priority shrink to their least
  size. If that is not enough, the lowest and youngest are paused (preemption.py).
- A shrunk run may grow again when it delays no waiting run.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from everstep.wire import Reason, ReasonCode, RunStatus
from everstep.wire.team import Quotas
from service.reconciler.capacity import (
    Free,
    Holding,
    Preemption,
    choose,
    has_gpus,
    most_workers,
    needs_of,
    remove,
    restore,
    room,
    take,
)
from service.reconciler.facts import NodeState, RunFacts
from service.reconciler.observe import infeasible, quota_reason, waiting

# ---------------------------------------------------------------- admission

# Admission of the queue to the cluster: which queued run starts, and what the others wait for.

DETAILED: Final = 20
"""Number of waiting runs with an exact reason. Reasons that change for thousands of runs would be
thousands of writes."""

_NO_QUOTAS: Final = Quotas()
_Shape = tuple[frozenset[tuple[str, float]], str]


@dataclass(frozen=True)
class Admission:
    """The decision about a queued run: it starts, or ``reason`` says what it waits for."""

    run_id: str
    reason: Reason | None = None
    limit: int | None = None
    """Most ranks that it may use, if fewer than it requested."""

    @property
    def starts(self) -> bool:
        """Whether the run starts now."""
        return self.reason is None


@dataclass
class Used:
    """Usage of a project, with what this plan has granted."""

    workers: int = 0
    running: int = 0


@dataclass
class _Placed:
    """The ranks of a run that starts: the index of a usable node for each."""

    run_id: str
    needs: dict[str, float]
    nodes: list[int] = field(default_factory=list)


class Queue:
    """The cluster while runs are considered in order. Each run that starts takes free resources."""

    def __init__(
        self,
        holding: Sequence[RunFacts],
        nodes: Sequence[NodeState],
        quotas: Mapping[str, Quotas],
        now: float,
    ) -> None:
        self._now = now
        self._nodes = nodes
        self._usable = [node for node in nodes if node.mark is None]
        self._index = {node.node_id: index for index, node in enumerate(self._usable)}
        self._cordoned = {node.node_id for node in nodes if node.mark == "cordoned"}
        self._gpus = has_gpus(nodes)
        self._quotas = quotas
        self._free: Free = [dict(node.resources) for node in self._usable]
        self._held: list[Holding] = []
        self._started: list[_Placed] = []
        self._blocker: RunFacts | None = None
        self._beside: Free = []
        """What the blocker will find free when all runs that started before its submission have
        ended."""
        self._coming: Free = []
        """What is free, and what runs that stop or shrink give back."""
        self.preemptions: tuple[Preemption, ...] = ()
        """The runs that make room for the first run that does not fit."""
        self._held_projects: dict[str, str] = {}
        """Project -> its first run that a quota holds back."""
        self._rooms: dict[tuple[str, _Shape], int] = {}
        self._refused: set[tuple[_Shape, int]] = set()
        """Shapes and least sizes that were refused since the last start."""
        self._num_detailed = 0
        self.used: dict[str, Used] = defaultdict(Used)
        self.admissions: list[Admission] = []
        for run in holding:
            self._hold(run)

    def _hold(self, run: RunFacts) -> None:
        """Subtract a run's ranks from what is free.

        Ranks are on the nodes that they report. Others, and those that must leave a node, count
        where Ray would place them.
        """
        used = self.used[run.project]
        used.workers += most_workers(run)
        used.running += 1
        needs = needs_of(run, self._gpus)
        most = most_workers(run) if run.shrunk_to is None else min(most_workers(run), run.shrunk_to)
        count = (run.world_size or most) - sum(
            node_id in self._cordoned for node_id in run.node_ids
        )
        placed = [self._index[node_id] for node_id in run.node_ids if node_id in self._index][
            : max(0, count)
        ]
        remove(self._free, needs, placed)
        placed += take(self._free, needs, count - len(placed), run.placement_strategy)
        self._held.append(Holding.of(run, needs, placed, self._now))

    def _room(self, kind: str, run: RunFacts, needs: dict[str, float]) -> int:
        """Return how many ranks of this shape fit on the empty cluster: ``all`` or ``open`` nodes.

        The result is cached.
        """
        key = kind, _shape(needs, run)
        if key not in self._rooms:
            nodes = self._nodes if kind == "all" else self._usable
            self._rooms[key] = room(
                [node.resources for node in nodes], needs, run.placement_strategy
            )
        return self._rooms[key]

    def consider(self, run: RunFacts) -> None:
        """Start a run, or record what it waits for."""
        needs = needs_of(run, self._gpus)
        reason = self._impossible(run, needs) or self._over_quota(run)
        if reason is not None:
            self.admissions.append(Admission(run.id, reason))
            return
        most = self._granted(run)
        if self._blocker is not None:
            self._backfill(self._blocker, run, needs, most)
        elif (now := room(self._free, needs, run.placement_strategy)) < run.min_workers:
            self._reserve(run)
            self._wait(run, needs, f"{now} fit now")
        else:
            self._start(run, needs, take(self._free, needs, most, run.placement_strategy), most)

    def _impossible(self, run: RunFacts, needs: dict[str, float]) -> Reason | None:
        """Return why the run cannot start whatever others do. Such a run holds nobody back."""
        if (all_room := self._room("all", run, needs)) < run.min_workers:
            return infeasible(run, needs, all_room)
        if (open_room := self._room("open", run, needs)) < run.min_workers:
            num_marked = len(self._nodes) - len(self._usable)
            why = (
                f"{num_marked} of {len(self._nodes)} nodes are cordoned or draining, the others "
                f"have room for {open_room} in all"
            )
            return waiting(run, needs, why)
        quota = self._quotas.get(run.project, _NO_QUOTAS).max_workers
        if quota is not None and run.min_workers > quota:
            message = (
                f"min_workers {run.min_workers} can never fit: project {run.project} has a quota "
                f"of {quota} workers. Lower "
                "scaling.min_workers, or ask an administrator for more."
            )
            return Reason(code=ReasonCode.INFEASIBLE, message=message)
        return None

    def _over_quota(self, run: RunFacts) -> Reason | None:
        """Return why its project's quota holds the run back now, or None."""
        quota, used = self._quotas.get(run.project, _NO_QUOTAS), self.used[run.project]
        if (first := self._held_projects.get(run.project)) is not None:
            return quota_reason(
                f"run {first} of project {run.project} is before it, which waits for the "
                "project's quota"
            )
        why = None
        if quota.max_running is not None and used.running >= quota.max_running:
            why = f"project {run.project} runs {used.running} of at most {quota.max_running}"
        elif quota.max_workers is not None and used.workers + run.min_workers > quota.max_workers:
            why = (
                f"project {run.project} uses up to {used.workers} of at most {quota.max_workers} "
                "workers"
            )
        if why is None:
            return None
        # Otherwise small runs of the project would take, one by one, what this one waits for.
        self._held_projects[run.project] = run.id
        return quota_reason(f"the quota of its project holds it back: {why}")

    def _granted(self, run: RunFacts) -> int:
        """Return the most ranks that its project's quota leaves."""
        quota = self._quotas.get(run.project, _NO_QUOTAS).max_workers
        return (
            run.max_workers
            if quota is None
            else min(run.max_workers, quota - self.used[run.project].workers)
        )

    def _start(self, run: RunFacts, needs: dict[str, float], placed: list[int], most: int) -> None:
        self._started.append(_Placed(run.id, needs, placed))
        self._refused.clear()
        used = self.used[run.project]
        used.workers += most
        used.running += 1
        self.admissions.append(Admission(run.id, limit=most if most < run.max_workers else None))

    def _wait(self, run: RunFacts, needs: dict[str, float], why: str) -> None:
        self._num_detailed += 1
        detail = why if self._num_detailed <= DETAILED else "others are before it"
        self.admissions.append(Admission(run.id, waiting(run, needs, detail)))

    def _reserve(self, run: RunFacts) -> None:
        """Reserve room for the first run that does not fit, so that later starts cannot starve it.

        Runs that started before its submission will end. Runs that start later may not, so it must
        fit beside all of them. What stopping and shrinking runs free for it is kept for it alone.
        """
        self._blocker = run
        self._beside = [dict(node.resources) for node in self._usable]
        for other in self._held:
            if other.run.submitted_at is None or other.run.submitted_at > run.created_at:
                remove(self._beside, other.needs, other.staying)
        for started in self._started:
            remove(self._beside, started.needs, started.nodes)
        self._coming = [dict(node) for node in self._free]
        for other in self._held:
            restore(self._coming, other.needs, other.leaving)
        self.preemptions = choose(
            run, needs_of(run, self._gpus), self._coming, self._held, self._now
        )

    def _backfill(
        self, blocker: RunFacts, run: RunFacts, needs: dict[str, float], most: int
    ) -> None:
        """Start a run behind the blocker if that does not delay the blocker."""
        tried = _shape(needs, run), run.min_workers
        who = f"run {blocker.id}" if blocker.project == run.project else "a run of another project"
        before = f"{who} is before it, and would be delayed"
        if tried in self._refused or self.preemptions:
            self._wait(run, needs, before)
            return
        fitting = min(most, room(self._free, needs, run.placement_strategy))
        blocker_needs = needs_of(blocker, self._gpus)
        spaces = (self._beside, self._coming)
        kept = [
            min(blocker.min_workers, room(space, blocker_needs, blocker.placement_strategy))
            for space in spaces
        ]
        if kept[1] < blocker.min_workers:
            kept[1] = 0  # The blocker cannot start from what is coming in any case.
        for count in dict.fromkeys((fitting, run.min_workers)):
            if not run.min_workers <= count <= fitting:
                continue
            placed = take(self._free, needs, count, run.placement_strategy)
            for space in spaces:
                remove(space, needs, placed)
            after = [room(space, blocker_needs, blocker.placement_strategy) for space in spaces]
            if after[0] >= kept[0] and after[1] >= kept[1]:
                # The run may not grow into what is kept for the blocker.
                self._start(run, needs, placed, count)
                return
            for space in (*spaces, self._free):
                restore(space, needs, placed)
        self._refused.add(tried)
        self._wait(run, needs, before)

    def grown(self) -> tuple[str, ...]:
        """Return the shrunk runs that may grow again.

        There is room for them, and the runs that they made room for do not wait any more.
        """
        starting = {placed.run_id for placed in self._started}
        starting |= {held.run.id for held in self._held if held.run.world_size is None}
        found = []
        for held in self._held:
            run = held.run
            if (
                run.shrunk_to is None
                or run.shrunk_by in starting
                or run.status == RunStatus.STOPPING
            ):
                continue
            in_the_way = self._blocker is not None and self._blocker.priority >= run.priority
            if not in_the_way and room(self._free, held.needs, run.placement_strategy) > 0:
                found.append(run.id)
        return tuple(found)


def _shape(needs: Mapping[str, float], run: RunFacts) -> _Shape:
    return frozenset(needs.items()), run.placement_strategy


# ---------------------------------------------------------------- schedule

PATIENCE_S: Final = 600.0
"""A run that has waited this long is ordered by age, whatever its project uses: fairness must not
starve a run."""


@dataclass(frozen=True)
class Plan:
    """The decisions about the queue. ``admissions`` has every queued run once, in order."""

    admissions: tuple[Admission, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    grown: tuple[str, ...] = ()
    """Shrunk runs that may grow again."""


def plan(
    queued: Sequence[RunFacts],
    holding: Sequence[RunFacts],
    nodes: Sequence[NodeState],
    quotas: Mapping[str, Quotas] | None = None,
    now: float = 0.0,
) -> Plan:
    """Decide about the whole queue.

    Args:
        queued: Runs that wait for a start.
        holding: Runs that have a job. They hold what they use or, while that is unknown, what they
            may use.
        nodes: Live nodes.
        quotas: Project -> its quotas, for projects that have some.
        now: Unix seconds.
    """
    queue = Queue(holding, nodes, quotas or {}, now)
    for run in _in_order(queued, queue.used, now):
        queue.consider(run)
    return Plan(tuple(queue.admissions), queue.preemptions, queue.grown())


def _in_order(
    queued: Sequence[RunFacts], used: Mapping[str, Used], now: float
) -> Iterator[RunFacts]:
    """Yield every queued run in order. ``used`` is read when the next run is requested."""
    by_priority: dict[int, list[RunFacts]] = defaultdict(list)
    for run in sorted(queued, key=lambda run: (run.created_at, run.id)):
        by_priority[run.priority].append(run)
    for priority in sorted(by_priority, reverse=True):
        projects: dict[str, deque[RunFacts]] = defaultdict(deque)
        for run in by_priority[priority]:
            if now - run.created_at >= PATIENCE_S:
                yield run
            else:
                projects[run.project].append(run)
        heap = [(used[name].workers, runs[0].created_at, name) for name, runs in projects.items()]
        heapq.heapify(heap)
        while heap:
            _, _, name = heapq.heappop(heap)
            yield projects[name].popleft()
            if projects[name]:
                heapq.heappush(heap, (used[name].workers, projects[name][0].created_at, name))
