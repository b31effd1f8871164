"""Recovery in the survivors' processes beside that in fresh ones, by turns on one cluster.

    python -m benchmarks staying --repeats 5 --case rank --case large

Three nodes of one CPU. Seconds run from the kill to the first step of all ranks that go on. A
drain's and a growth's pause is the time without any step, by the ranks' own clocks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import heavy_task
from benchmarks.faults import drain, growth, recovery, settle
from benchmarks.recovery import GIVE_UP_S, cancel, kill
from benchmarks.report import summary, write
from benchmarks.workloads import WORKLOADS
from everstep.client.runs import RunHandle
from tests.support.service_process import ServiceProcess, wait_for

NODES = 3
LARGE_MB = 1000
MODES = {"fresh": False, "in process": True}
Found = dict[str, float]


def rank(service: ServiceProcess, run: RunHandle) -> Found:
    """A rank's process dies, and another takes its place."""
    pid = run.attempts()[-1].workers[-1].pid
    return recovery(run, lambda: kill([pid]))


def node(service: ServiceProcess, run: RunHandle) -> Found:
    """A node dies, and the run goes on with a rank less."""
    victim = run.attempts()[-1].workers[-1].node_id

    def kill_node() -> float:
        began = time.time()
        service.kill_node(victim)
        return began

    found = recovery(run, kill_node)
    service.mend()
    return found


def twice(service: ServiceProcess, run: RunHandle) -> Found:
    """A rank dies, and one of the next group as soon as that is known. Seconds run from the second
    death."""
    first = run.attempts()[-1]
    began = kill([first.workers[-1].pid])
    attempts = wait_for(
        lambda: [each for each in run.attempts() if each.attempt > first.attempt],
        GIVE_UP_S,
        "the next group",
        every_s=0.01,
    )
    between_s = 0.0

    def kill_again() -> float:
        nonlocal between_s
        killed_at = kill([attempts[-1].workers[0].pid])
        between_s = killed_at - began
        return killed_at

    return recovery(run, kill_again) | {"between_s": between_s}


CASES: dict[str, tuple[int, Callable[[ServiceProcess, RunHandle], Found]]] = {
    "rank": (2, rank),
    "node": (NODES, node),
    "large": (NODES, node),
    "twice": (2, twice),
    "growth": (NODES, growth),
    "drain": (2, drain),
}
"""How many ranks train, and what happens to them. ``large`` is ``node`` with a large state."""


def start(service: ServiceProcess, case: str, *, in_process: bool, megabytes: int) -> RunHandle:
    """Begin a run, and wait until it trains at full size."""
    ranks, client = CASES[case][0], service.client()
    spec: dict[str, Any] = dict(WORKLOADS["digits"])
    if case == "large":
        archive = client.code.upload(Path(heavy_task.__file__)).digest
        del spec["task"]
        arguments = {"megabytes": megabytes}
        spec["code"] = {"archive": archive, "task": "heavy_task:HeavyTask", "args": arguments}
    spec |= {
        "scaling": {"min_workers": 1, "max_workers": ranks},
        "recovery": {"in_process": in_process},
        "train": {**spec["train"], "micro_batch_size": 32, "max_steps": 1_000_000},
        "checkpoint": {"every_steps": None if case == "large" else 50},
    }
    run = client.runs.create(spec)
    settle(run, ranks)
    return run


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--case", choices=sorted(CASES), action="append")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mb", type=int, default=LARGE_MB, help="size of the large state")
    options = parser.parse_args(argv)
    results: dict[str, list[Found]] = {}
    with ServiceProcess(nodes=NODES) as service:
        for case in options.case or CASES:
            for turn in range(options.repeats):
                for mode in sorted(MODES, reverse=turn % 2 == 1):
                    on = MODES[mode]
                    run = start(service, case, in_process=on, megabytes=options.mb)
                    found = CASES[case][1](service, run)
                    rungs = [failure.rung for failure in run.failures()]
                    print(case, mode, found, rungs, flush=True)
                    results.setdefault(f"{case}, {mode}", []).append(found)
                    cancel(run)
    write(
        "staying",
        {
            name: {key: summary([each[key] for each in found]) for key in found[0]}
            for name, found in results.items()
        },
    )
