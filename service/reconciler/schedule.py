"""Which queued runs start, with how many ranks, and which running ones make room: pure
(docs/scheduling.md).

- Order: priority; within one, runs that have waited for ``PATIENCE_S`` by age, then the project
  that uses least, then age.
- A run starts when its ``min_workers`` fit, its project's quotas allow it, and no run before it
  would be delayed.
- The first run that does not fit is reserved for: a later one starts beside it only on what it does
  not need.
- A run that its project's quota holds back holds back later runs of that project, and of no other.
- Where it makes room for the first that does not fit, runs of lower priority shrink to their least
  size; where that is too little, the lowest and youngest are paused (preemption.py).
- A run that was shrunk may grow again once nobody waits whom it would be in the way of.
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
"""A run that has waited for so long goes by its age, whatever its project uses: fairness must not
starve anybody."""


@dataclass(frozen=True)
class Plan:
    """What to do with the queue; ``admissions`` has every queued run once, in the order in which
    they were looked at."""

    admissions: tuple[Admission, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    grown: tuple[str, ...] = ()
    """Shrunk runs that need make room no longer."""


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
        holding: Runs that have a job: they hold what they use, and while that is not known, what
            they may use.
        nodes: Live nodes.
        quotas: Of projects that have any, by name.
        now: Unix seconds.
    """
    queue = Queue(holding, nodes, quotas or {}, now)
    for run in _in_order(queued, queue.used, now):
        queue.consider(run)
    return Plan(tuple(queue.admissions), queue.preemptions(), queue.grown())


def _in_order(
    queued: Sequence[RunFacts], used: Mapping[str, Used], now: float
) -> Iterator[RunFacts]:
    """Every queued run; fairness looks at what projects use at the moment when the next one is
    asked for."""
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
