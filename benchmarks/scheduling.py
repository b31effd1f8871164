"""A simulated day of a busy cluster under the scheduler: ``python -m benchmarks.scheduling [RUNS]``
writes docs/scheduling.svg.

Time is simulated, the scheduler is the service's own. Runs come at random at nine tenths of what
the cluster can do, in three projects of which one submits half, with sizes from 1 to 48 ranks, some
elastic, one in twenty of a higher priority.
"""

from __future__ import annotations

import heapq
import random
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from everstep.wire import RunStatus
from everstep.wire.team import Quotas
from service.reconciler.facts import NodeState, RunFacts
from service.reconciler.schedule import plan

NODES: Final = tuple(NodeState(f"n{index}", {"CPU": 8.0}) for index in range(16))
CAPACITY: Final = 128
QUOTAS: Final = {"busy": Quotas(max_workers=96)}
LOAD: Final = 0.9
MEAN_S: Final = 600.0
PAUSE_S: Final = 15.0
"""A run that pauses or shrinks needs so long for its checkpoint."""
SIZES: Final = (1, 1, 1, 1, 2, 2, 2, 4, 4, 8, 16, 48)
PLOT: Final = Path(__file__).parents[1] / "docs" / "scheduling.svg"


@dataclass
class Work:
    """What a run still has to do, in rank-seconds, and since when it does it."""

    left: float
    submitted_at: float
    started_at: float | None = None
    since: float = 0.0
    submission: int = 0


class Simulation:
    """Events in order of time; after each one the whole queue is planned."""

    def __init__(self, num_runs: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_runs = num_runs
        self.now = 0.0
        self.events: list[tuple[float, str, str, int]] = []
        self.queued: dict[str, RunFacts] = {}
        self.holding: dict[str, RunFacts] = {}
        self.work: dict[str, Work] = {}
        self.waits: dict[int, list[float]] = {}
        self.samples: list[tuple[float, float, int]] = []
        self.busy_s = 0.0
        self.paused: Counter[str] = Counter()
        self.shrunk: Counter[str] = Counter()

    def run(self) -> None:
        """Until every run has ended. Asserts at every event that neither the cluster nor a quota is
        exceeded."""
        at = 0.0
        rate = LOAD * CAPACITY / (MEAN_S * statistics.mean(SIZES))
        for index in range(self.num_runs):
            at += self.random.expovariate(rate)
            heapq.heappush(self.events, (at, "submit", f"run_{index:05d}", 0))
        while self.events:
            at, kind, name, submission = heapq.heappop(self.events)
            used = self.used()
            self.busy_s += used * (at - self.now)
            self.now = at
            if kind == "submit":
                self.submit(name)
            elif name in self.holding and self.work[name].submission == submission:
                if kind == "shrunk":
                    self.resize(name, self.holding[name].shrunk_to or 0)
                else:
                    self.leave(name, ended=kind == "end")
            self.schedule()
            self.samples.append((at, self.used() / CAPACITY, len(self.queued)))

    def used(self) -> int:
        return sum(found.world_size or 0 for found in self.holding.values())

    def submit(self, name: str) -> None:
        size = self.random.choice(SIZES)
        most = 2 * size if self.random.random() < 0.3 else size
        self.work[name] = Work(self.random.expovariate(1 / MEAN_S) * size, self.now)
        self.queued[name] = RunFacts(
            id=name,
            status=RunStatus.QUEUED,
            created_at=self.now,
            project=self.random.choice(("busy", "busy", "b", "c")),
            priority=int(self.random.random() < 0.05),
            min_workers=size,
            max_workers=most,
        )

    def leave(self, name: str, *, ended: bool) -> None:
        found, work = self.holding.pop(name), self.work[name]
        if not ended:
            work.left = max(0.0, work.left - (self.now - work.since) * (found.world_size or 0))
            queued = replace(
                found,
                status=RunStatus.QUEUED,
                world_size=None,
                workers_limit=None,
                submitted_at=None,
            )
            self.queued[name] = replace(queued, shrunk_to=None, shrunk_by=None, shrunk_at=None)

    def resize(self, name: str, ranks: int) -> None:
        """Go on with another number of ranks; what ends when is another matter from now on."""
        found, work = self.holding[name], self.work[name]
        work.left = max(0.0, work.left - (self.now - work.since) * (found.world_size or 0))
        work.since, work.submission = self.now, work.submission + 1
        self.holding[name] = replace(found, world_size=ranks, submission=work.submission)
        heapq.heappush(self.events, (self.now + work.left / ranks, "end", name, work.submission))

    def schedule(self) -> None:
        made = plan(
            list(self.queued.values()), list(self.holding.values()), NODES, QUOTAS, self.now
        )
        free = CAPACITY - self.used()
        for admission in made.admissions:
            if admission.starts:
                found, work = self.queued.pop(admission.run_id), self.work[admission.run_id]
                ranks = min(free, found.max_workers if admission.limit is None else admission.limit)
                assert ranks >= found.min_workers
                free -= ranks
                if work.started_at is None:
                    work.started_at = self.now
                    self.waits.setdefault(found.min_workers, []).append(
                        self.now - work.submitted_at
                    )
                work.since, work.submission = self.now, work.submission + 1
                begun = replace(
                    found, status=RunStatus.RUNNING, world_size=ranks, workers_limit=admission.limit
                )
                self.holding[found.id] = replace(
                    begun, submitted_at=self.now, submission=work.submission
                )
                heapq.heappush(
                    self.events, (self.now + work.left / ranks, "end", found.id, work.submission)
                )
        for name in made.grown:
            found = self.holding[name]
            more = min(free, (found.workers_limit or found.max_workers) - (found.world_size or 0))
            free -= more
            self.holding[name] = replace(found, shrunk_to=None, shrunk_by=None, shrunk_at=None)
            self.resize(name, (found.world_size or 0) + more)
        for preemption in made.preemptions:
            found, to = self.holding[preemption.run_id], preemption.to
            (self.paused if to is None else self.shrunk)[found.id] += 1
            shrinking = replace(found, shrunk_to=to, shrunk_by=preemption.by, shrunk_at=self.now)
            self.holding[found.id] = (
                replace(found, status=RunStatus.STOPPING) if to is None else shrinking
            )
            what = "paused" if to is None else "shrunk"
            heapq.heappush(
                self.events, (self.now + PAUSE_S, what, found.id, self.work[found.id].submission)
            )
        assert self.used() <= CAPACITY
        granted = (
            found.workers_limit or found.max_workers
            for found in self.holding.values()
            if found.project == "busy"
        )
        assert sum(granted) <= 96

    def report(self) -> str:
        rows = ["| min_workers | runs | median wait | p99 | longest |", "|---|---|---|---|---|"]
        for size, waits in sorted(self.waits.items()):
            waits.sort()
            row = (statistics.median(waits), waits[int(0.99 * (len(waits) - 1))], waits[-1])
            rows.append(
                f"| {size} | {len(waits)} | "
                + " | ".join(f"{seconds:.0f} s" for seconds in row)
                + " |"
            )
        used = self.busy_s / (self.now * CAPACITY)
        return "\n".join(rows) + (
            f"\n\n{self.now / 3600:.1f} h simulated; {used:.1%} of the cluster used; "
            f"{sum(self.paused.values())} pauses of "
            f"{len(self.paused)} runs, {sum(self.shrunk.values())} shrinkings of "
            f"{len(self.shrunk)}; "
            f"{len(self.queued) + len(self.holding)} runs left over."
        )

    def plot(self) -> str:
        """Share of CPUs in use, and the queue's length, over simulated hours, as SVG."""
        width, height, columns = 900, 170, 450
        longest = max(length for _, _, length in self.samples) or 1
        lines = []
        for top, name, value in (
            (20, "CPUs in use", 1),
            (230, f"runs waiting (most: {longest})", 2),
        ):
            means: list[list[float]] = [[] for _ in range(columns)]
            for sample in self.samples:
                scaled = sample[value] if value == 1 else sample[value] / longest
                means[min(columns - 1, int(columns * sample[0] / self.now))].append(scaled)
            points, last = [], 0.0
            for column, values in enumerate(means):
                last = statistics.mean(values) if values else last
                points.append(
                    f"{column * width / columns:.0f},{top + 10 + height * (1 - last):.0f}"
                )
            lines.append(
                f'<text x="0" y="{top}">{name}</text><rect x="0" y="{top + 10}" width="{width}" '
                f'height="{height}"/>'
            )
            lines.append(f'<polyline points="{" ".join(points)}"/>')
        style = "text{font:13px sans-serif}rect{fill:#f4f4f4}polyline{fill:none;stroke:#1f6feb}"
        hours = (
            f'<text x="0" y="435">0 h</text><text x="{width}" y="435" '
            f'text-anchor="end">{self.now / 3600:.0f} h</text>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 445" '
            f'width="{width}"><style>{style}</style>'
        )
        return f"{head}\n" + "\n".join([*lines, hours]) + "\n</svg>\n"


if __name__ == "__main__":
    simulation = Simulation(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, seed=7)
    simulation.run()
    PLOT.write_text(simulation.plot())
    print(simulation.report())
