"""Faults that are done to real processes of a run, and the seeded plans that say when."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from random import Random

import psutil

from everstep.runs import RunHandle
from tests.service_process import ServiceProcess, wait_for

KINDS = ("rank_killed", "rank_stopped", "node_killed", "driver_killed", "service_killed")
_WEIGHTS = (6, 1, 3, 1, 2)
NUM_NODES = 3


@dataclass(frozen=True)
class Fault:
    """One fault: after ``step`` has been reached and ``delay_s`` have passed; ``pick`` chooses the victim among those there are."""

    kind: str
    step: int
    delay_s: float
    pick: float


def plan(seed: int, total_steps: int, most: int = 4) -> list[Fault]:
    """One to ``most`` faults in the order of their steps. Every third one but the first strikes within a second of the one
    before, that is in its recovery."""
    random = Random(seed)
    steps = sorted(random.randrange(0, total_steps * 3 // 4) for _ in range(random.randint(1, most)))
    faults: list[Fault] = []
    for number, step in enumerate(steps):
        [kind] = random.choices(KINDS, _WEIGHTS)
        follows = number > 0 and random.random() < 1 / 3
        step = faults[-1].step if follows else step
        faults.append(Fault(kind, step, random.uniform(0.0, 1.0 if follows else 0.3), random.random()))
    return faults


def strike(fault: Fault, service: ServiceProcess, run: RunHandle) -> str | None:
    """Do it; what was done, None where the run was over before or its victim gone."""
    if not _reach(fault.step, run):
        return None
    time.sleep(fault.delay_s)
    if fault.kind == "service_killed":
        service.kill()
        service.start()
        return "service"
    if fault.kind == "driver_killed":
        return _signal(_driver_pid(run), signal.SIGKILL, "driver")
    attempts = run.attempts()
    if not attempts or not attempts[-1].workers:
        return None
    workers = attempts[-1].workers
    worker = workers[int(fault.pick * len(workers))]
    if fault.kind == "node_killed":
        return _kill_node(service, worker.node_id)
    number = signal.SIGSTOP if fault.kind == "rank_stopped" else signal.SIGKILL
    return _signal(worker.pid, number, f"rank {worker.rank}")


def _reach(step: int, run: RunHandle) -> bool:
    wait_for(lambda: run.refresh().status.terminal or run.step >= step, 240, f"step {step} of {run.id} ({run.status})")
    return not run.status.terminal


def _driver_pid(run: RunHandle) -> int | None:
    pids = [event.data["driver_pid"] for event in run.events() if event.kind == "submission_started"]
    return int(pids[-1]) if pids else None


def _signal(pid: int | None, number: signal.Signals, who: str) -> str | None:
    try:
        if pid is None or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return None
        os.kill(pid, number)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
    return f"{who} by {number.name}"


def _kill_node(service: ServiceProcess, node_id: str) -> str | None:
    """SIGKILL to the node and all on it; the keeper is asked for another one, which the run grows onto."""
    if node_id not in {node["node_id"] for node in service.cluster()["nodes"]}:
        return None
    service.kill_node(node_id)
    wait_for(lambda: node_id not in {node["node_id"] for node in service.cluster()["nodes"]}, 20, "the keeper's notice")
    os.kill(service.cluster()["keeper_pid"], signal.SIGUSR1)
    return f"node {node_id[:8]}"


def whole(service: ServiceProcess) -> bool:
    """Whether the cluster has all its nodes beside the head."""
    return len([node for node in service.cluster()["nodes"] if not node["is_head"]]) == NUM_NODES
