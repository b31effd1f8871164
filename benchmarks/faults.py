"""What each other fault costs a run: a hang, a driver's death, a drain, a node that comes back, the
service's death.

    python -m benchmarks faults --repeats 5

Two nodes of one CPU, one rank each, digits. A pause is the time without any step, by the ranks' own
clocks: from the last step before to the first after. Seconds to recover run from the fault itself.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.recovery import GIVE_UP_S, SETTLE_STEPS, cancel, kill
from benchmarks.report import summary, write
from benchmarks.steps import Point, around, longest_gap, points
from benchmarks.workloads import WORKLOADS
from everstep.client.runs import RunHandle
from tests.support.service_process import ServiceProcess, wait_for

HANG_TIMEOUT_S = 10
DRAIN_S = 30
WATCH_S = 6.0


def start(service: ServiceProcess) -> RunHandle:
    spec: dict[str, Any] = {
        **WORKLOADS["digits"],
        "scaling": {"min_workers": 1, "max_workers": 2},
        "recovery": {"hang_timeout_s": HANG_TIMEOUT_S},
    }
    spec["train"] = {**spec["train"], "max_steps": 1_000_000}
    run = service.client().runs.create(spec)
    settle(run)
    return run


def settle(run: RunHandle, ranks: int = 2) -> None:
    """Wait until the newest attempt, with all its ranks, has been training for a while."""

    def settled() -> bool:
        if run.refresh().status != "RUNNING" or not run.attempts():
            return False
        attempt = run.attempts()[-1]
        began = attempt.first_step
        return (
            attempt.world_size == ranks and began is not None and run.step >= began + SETTLE_STEPS
        )

    wait_for(settled, GIVE_UP_S, f"{ranks} ranks that train {run.id}")


def recovery(run: RunHandle, fault: Callable[[], float]) -> dict[str, float]:
    """Do a fault and wait for the first step of the attempt that follows."""
    attempt = run.refresh().attempt
    lost = run.steps_lost
    began = fault()
    last, new = around(run, attempt, began, GIVE_UP_S)
    wait_for(
        lambda: run.refresh().status == "RUNNING" and run.step >= new[0],
        GIVE_UP_S,
        "the service to know of it",
    )
    return {
        "recovery_s": new[1] - began,
        "pause_s": new[1] - last[1],
        "steps_lost": run.steps_lost - lost,
    }


def hang(service: ServiceProcess, run: RunHandle) -> dict[str, float]:
    def stop() -> float:
        os.kill(run.attempts()[-1].workers[1].pid, signal.SIGSTOP)
        return time.time()

    return recovery(run, stop)


def driver(service: ServiceProcess, run: RunHandle) -> dict[str, float]:
    pids = [
        event.data["driver_pid"] for event in run.events() if event.kind == "submission_started"
    ]
    return recovery(run, lambda: kill([pids[-1]]))


def drain(service: ServiceProcess, run: RunHandle) -> dict[str, float]:
    """The node is freed again afterwards: what growing back costs is ``growth``'s to measure."""
    nodes = service.client().nodes
    node = run.attempts()[-1].workers[1].node_id

    def ask() -> float:
        began = time.time()
        nodes.drain(node, deadline_s=DRAIN_S)
        return began

    result = recovery(run, ask)
    nodes.uncordon(node)
    return result


def _killed_at(service: ServiceProcess, node: str) -> float:
    service.kill_node(node)
    return time.time()


def growth(service: ServiceProcess, run: RunHandle) -> dict[str, float]:
    """A node dies and another comes; measured is what the coming of the second costs, from when it
    is there. ``gap_s`` is the longest time between two steps meanwhile."""
    victim = run.attempts()[-1].workers[1].node_id
    recovery(run, lambda: _killed_at(service, victim))
    wait_for(lambda: victim not in _nodes(service), GIVE_UP_S, "the keeper's notice")
    service.refill()

    def added() -> float:
        wait_for(lambda: len(_nodes(service)) == service.num_nodes + 1, GIVE_UP_S, "the new node")
        return time.time()

    attempt, arrived_at = run.refresh().attempt, time.time()
    found = recovery(run, added)
    return found | {"gap_s": longest_gap(run, attempt, arrived_at, GIVE_UP_S)}


def service_death(service: ServiceProcess, run: RunHandle) -> dict[str, float]:
    """Median step time while the service is dead over that just before: training does not
    notice."""
    time.sleep(WATCH_S)
    killed_at = time.time()
    service.kill()
    time.sleep(WATCH_S)
    back_at = time.time()
    service.start()
    wait_for(
        lambda: run.refresh().status == "RUNNING" and points(run, back_at)[-1][1][1] > back_at,
        GIVE_UP_S,
        "the backlog",
    )
    steps = [point for _, point in points(run, killed_at - WATCH_S)]
    return {
        "step_time_ratio": _median_step(steps, killed_at, back_at)
        / _median_step(steps, killed_at - WATCH_S, killed_at)
    }


def _median_step(steps: list[Point], begin: float, end: float) -> float:
    times = [at for _, at in steps if begin <= at < end]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def _nodes(service: ServiceProcess) -> set[str]:
    return {node["node_id"] for node in service.cluster()["nodes"]}


KINDS: dict[str, Callable[[ServiceProcess, RunHandle], dict[str, float]]] = {
    "service": service_death,
    "drain": drain,
    "growth": growth,
    "hang": hang,
    "driver": driver,
}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--kind", choices=sorted(KINDS), action="append")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.repeats):
        with ServiceProcess(nodes=2) as service:
            run = start(service)
            for kind in options.kind or KINDS:
                settle(run)
                result = KINDS[kind](service, run)
                print(kind, result, flush=True)
                results.setdefault(kind, []).append(result)
            cancel(run)
    write(
        "faults",
        {
            kind: {key: summary([one[key] for one in found]) for key in found[0]}
            for kind, found in results.items()
        },
    )
