"""Faults that are done to real processes of a run, and the seeded plans that say when."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from random import Random

import psutil

from everstep.client.runs import RunHandle
from tests.support.service_process import ServiceProcess, wait_for

_WEIGHTS = {
    "rank_killed": 6,
    "rank_stopped": 2,
    "node_killed": 3,
    "node_stopped": 1,
    "driver_killed": 2,
    "driver_stopped": 1,
    "service_killed": 2,
    "service_stopped": 1,
}
"""How often each kind comes. A rank that is stopped stays so; the others go on after
``STOPPED_S``."""
STOPPED_S = 4.0


@dataclass(frozen=True)
class Fault:
    """One fault: after ``step`` has been reached and ``delay_s`` have passed; ``pick`` chooses the
    victim among those there are."""

    kind: str
    step: int
    delay_s: float
    pick: float


def plan(seed: int, total_steps: int, most: int = 6) -> list[Fault]:
    """Two to ``most`` faults in the order of their steps. Every third one but the first strikes
    within a second of the one before, that is in its recovery, and half of these at once."""
    random = Random(seed)
    steps = sorted(
        random.randrange(0, total_steps * 3 // 4) for _ in range(random.randint(2, most))
    )
    faults: list[Fault] = []
    for number, step in enumerate(steps):
        [kind] = random.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        follows = number > 0 and random.random() < 1 / 3
        step = faults[-1].step if follows else step
        delay_s = (
            random.choice([0.0, random.uniform(0.0, 1.0)]) if follows else random.uniform(0.0, 0.3)
        )
        faults.append(Fault(kind, step, delay_s, random.random()))
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
    if fault.kind == "service_stopped":
        assert service.process is not None
        return _stop_for_a_while([service.process.pid], "service")
    if fault.kind == "driver_killed":
        return _signal(_driver_pid(run), signal.SIGKILL, "driver")
    if fault.kind == "driver_stopped":
        pid = _driver_pid(run)
        return _stop_for_a_while([pid] if pid else [], "driver")
    attempts = run.attempts()
    if not attempts or not attempts[-1].workers:
        return None
    workers = attempts[-1].workers
    worker = workers[int(fault.pick * len(workers))]
    if fault.kind == "node_killed":
        return _kill_node(service, worker.node_id)
    if fault.kind == "node_stopped":
        return _stop_node(service, worker.node_id)
    number = signal.SIGSTOP if fault.kind == "rank_stopped" else signal.SIGKILL
    return _signal(worker.pid, number, f"rank {worker.rank} on node {worker.node_id[:8]}")


def _reach(step: int, run: RunHandle) -> bool:
    reached = f"step {step} of {run.id} ({run.status})"
    wait_for(lambda: run.refresh().status.terminal or run.step >= step, 240, reached, every_s=0.1)
    return not run.status.terminal


def _driver_pid(run: RunHandle) -> int | None:
    pids = [
        event.data["driver_pid"] for event in run.events() if event.kind == "submission_started"
    ]
    return int(pids[-1]) if pids else None


def _signal(pid: int | None, number: signal.Signals, who: str) -> str | None:
    try:
        if pid is None or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return None
        os.kill(pid, number)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
    return f"{who} by {number.name}"


def _stop_for_a_while(pids: list[int], who: str) -> str | None:
    """SIGSTOP, and SIGCONT seconds later: to the others it is dead, and then it is not."""
    stopped = [pid for pid in pids if _signal(pid, signal.SIGSTOP, who)]
    time.sleep(STOPPED_S)
    for pid in stopped:
        _signal(pid, signal.SIGCONT, who)
    return f"{who} by SIGSTOP for {STOPPED_S:g} s" if stopped else None


def _stop_node(service: ServiceProcess, node_id: str) -> str | None:
    """Stop a node with all that is on it: the cluster gives it up, and it wakes as one that is not
    wanted any more."""
    found = [node for node in service.cluster()["nodes"] if node["node_id"] == node_id]
    if not found:
        return None
    raylet = psutil.Process(found[0]["raylet_pid"])
    stopped = _stop_for_a_while(
        [raylet.pid, *(child.pid for child in raylet.children(recursive=True))],
        f"node {node_id[:8]}",
    )
    if node_id not in {node["node_id"] for node in service.cluster()["nodes"]}:
        service.refill()
    return stopped


def _kill_node(service: ServiceProcess, node_id: str) -> str | None:
    """SIGKILL to the node and all on it; the keeper is asked for another one, which the run grows
    onto."""
    if node_id not in {node["node_id"] for node in service.cluster()["nodes"]}:
        return None
    service.kill_node(node_id)
    wait_for(
        lambda: node_id not in {node["node_id"] for node in service.cluster()["nodes"]},
        120,
        "the keeper's notice",
    )
    service.refill()
    return f"node {node_id[:8]}"
