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
from dataclasses import dataclass
from typing import Final

from everstep.wire.team import Quotas
from service.reconciler.admission import Admission, Queue, Used
from service.reconciler.facts import NodeFacts, RunFacts
from service.reconciler.preemption import Preemption

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
    nodes: Sequence[NodeFacts],
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
