"""A run of many ranks, whole: a service with a cluster of its own on one machine, eight ranks a
node, a tiny model, one thread a rank.

    python -m benchmarks scale --whole 8 16 32

Prints seconds and CPU seconds (of the whole machine) of each part, and the exponent with which they
grow from the second largest number of ranks to the largest. The ranks share the machine's cores, so
seconds that are CPU seconds over the cores say what the work is, not how long it takes on nodes of
their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from benchmarks.main_job import DIGITS
from benchmarks.report import grown
from everstep.client.runs import RunHandle
from tests.support.service_process import ServiceProcess, wait_for

PER_NODE = 8
PATIENCE_S = 900.0
STEADY_STEPS = 20
NO_PRECEDENCE = ("setpriv", "--bounding-set", "-sys_nice")
"""Many ranks on few cores would keep everything else from running if they ran first."""
SPEC: dict[str, Any] = {
    **DIGITS,
    "name": "many ranks",
    "task": {
        "name": "image_classification",
        "model": {"name": "mini_resnet", "args": {"width": 4, "blocks_per_stage": 1}},
        "data": {"name": "digits"},
    },
    "train": {"epochs": 10_000, "micro_batch_size": 4},
    "checkpoint": {"every_steps": 1000},
}
Row = dict[str, float]


class Meter:
    """Seconds and busy CPU seconds of the machine, by part."""

    def __init__(self) -> None:
        self.row: Row = {}

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        began, busy = time.perf_counter(), _busy_s()
        yield
        self.row[part] = time.perf_counter() - began
        self.row[f"{part}, CPU"] = _busy_s() - busy


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def whole_run(num_ranks: int) -> Row:
    """Start, train, lose a node, grow again, and cancel: one run of ``num_ranks``."""
    nodes = max(2, num_ranks // PER_NODE)
    a_node = num_ranks // nodes
    scaling = {"min_workers": a_node, "max_workers": num_ranks}
    train = {**SPEC["train"], "global_batch_size": 4 * num_ranks}
    meter = Meter()
    with (
        ServiceProcess(nodes=nodes, cpus_per_node=a_node, prefix=NO_PRECEDENCE) as service,
        service.client() as client,
    ):
        with meter.of("start"):
            run = client.runs.create({**SPEC, "train": train, "scaling": scaling})
            _wait(lambda: run.refresh().step > 0, "the first step")
        first = run.attempts()[-1]
        with meter.of(f"{STEADY_STEPS} steps"):
            _steps(run, STEADY_STEPS)
        meter.row["memory of all, GB"] = psutil.virtual_memory().used / 1e9
        with meter.of("a page of the run"):
            run.attempts(), run.failures(), run.refresh()
        with meter.of("a node of ranks dies"):
            service.kill_node(first.workers[-1].node_id)
            _wait(lambda: len(run.failures()) > 0, "a failure")
            _steps(run, 1)
        [failure] = run.failures()
        meter.row["steps lost"] = failure.steps_lost or 0
        [recovered] = [event.data for event in run.events() if event.kind == "recovered"]
        meter.row |= {f"… {phase}": seconds for phase, seconds in recovered["phases"].items()}
        smaller = run.attempts()[-1]
        assert smaller.world_size == num_ranks - a_node
        with meter.of("a node of ranks joins"):
            service.refill()
            _wait(lambda: run.attempts()[-1].world_size == num_ranks, "growth")
            _steps(run, 1)
        with meter.of("cancel"):
            run.cancel()
            _wait(lambda: run.refresh().status.terminal, "the end")
    return meter.row


def _wait(fact: Callable[[], object], what: str) -> None:
    wait_for(fact, PATIENCE_S, what, every_s=0.2)


def _steps(run: RunHandle, count: int) -> None:
    goal = run.refresh().step + count
    _wait(lambda: run.refresh().step >= goal, f"step {goal}")


def measure(counts: Sequence[int]) -> dict[str, Any]:
    """Print a row for each part: its seconds at each number of ranks, and how it grows."""
    rows = []
    for num_ranks in counts:
        rows.append(whole_run(num_ranks))
        print(num_ranks, {part: round(value, 2) for part, value in rows[-1].items()}, flush=True)
    return grown(counts, rows, 2, lambda _, before, newest: min(before, newest) > 0)
