"""From the SIGKILL of a node or a rank to the next step: Everstep, torchft, torchrun elastic and
plain Ray Train, on one loop and machine.

    python -m benchmarks recovery --repeats 5 --kill node

Two nodes of one CPU, one rank each; the same model, data and checkpoint interval. Seconds run from
the kill to the first new step of all ranks that go on; steps lost are those that had been done and
are done again. torchft is measured where it is installed (``pip install --no-deps
torchft==0.2.0``), at its defaults and with heartbeats of a second; there the batches are counted
that no step has used. For both, ``join_gap_s`` is how long a newcomer in a dead node's place
stopped the others. With ``--cold`` Everstep runs on a cluster that somebody else set up: without
preloaded modules and without spare processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import summary, write
from benchmarks.steps import around, longest_gap
from benchmarks.workloads import WORKLOADS
from everstep.client.runs import RunHandle
from tests.support.service_process import ServiceProcess, free_port, wait_for

SETTLE_STEPS = 325
"""Steps before the kill: past start-up and the first checkpoints, half-way to the next."""
GIVE_UP_S = 240.0


@dataclass(frozen=True)
class Recovery:
    recovery_s: float
    steps_lost: int | None
    """None, as the size, where training did not come back while it was waited for."""
    world_size: int | None
    join_gap_s: float | None = None
    """Longest time between two steps while a newcomer enters; None where that was not tried."""
    batches_dropped: int = 0


GIVEN_UP = Recovery(GIVE_UP_S, None, None)
"""No step of the others for so long: the recovery takes at least that."""


def kill(pids: list[int]) -> float:
    """SIGKILL the processes and all below them, as a power cut would; the time of it."""
    victims = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            victims += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    killed_at = time.time()
    for process in victims:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return killed_at


# ---------------------------------------------------------------- Everstep


def everstep(service: ServiceProcess, workload: str, what: str) -> Recovery:
    spec = {**WORKLOADS[workload], "scaling": {"min_workers": 1, "max_workers": 2}}
    run = service.client().runs.create(spec)
    wait_for(
        lambda: run.refresh().step >= SETTLE_STEPS, GIVE_UP_S, f"step {SETTLE_STEPS} of {run.id}"
    )
    attempt = run.attempts()[-1]
    victim = attempt.workers[-1]
    if what == "rank":
        killed_at = kill([victim.pid])
    elif (service.home / "cluster.json").exists():
        [node] = [node for node in service.cluster()["nodes"] if node["node_id"] == victim.node_id]
        killed_at = kill([node["raylet_pid"]])
    else:
        killed_at = kill([psutil.Process(victim.pid).ppid()])
    wait_for(
        lambda: run.refresh().attempt > attempt.attempt and run.status == "RUNNING",
        GIVE_UP_S,
        "the recovery",
    )
    _, (_, first_at) = around(run, attempt.attempt, killed_at, GIVE_UP_S)
    failure, after = run.failures()[0], run.attempts()[-1]
    join_gap_s = None
    if what == "node" and (service.home / "cluster.json").exists():
        join_gap_s = newcomer(service, run, victim.node_id)
    cancel(run)
    assert failure.steps_lost is not None
    return Recovery(first_at - killed_at, failure.steps_lost, after.world_size, join_gap_s)


def cancel(run: RunHandle) -> None:
    """Cancel a run, and wait until it is."""
    run.cancel()
    wait_for(lambda: run.refresh().status == "CANCELLED", GIVE_UP_S, "the cancel")


def newcomer(service: ServiceProcess, run: RunHandle, dead: str) -> float:
    """Replace the node; the longest time between two steps until the run has grown onto the new
    one."""
    wait_for(
        lambda: dead not in {node["node_id"] for node in service.cluster()["nodes"]},
        GIVE_UP_S,
        "the keeper's notice",
    )
    began, attempt = time.time(), run.attempts()[-1].attempt
    service.refill()
    return longest_gap(run, attempt, began, GIVE_UP_S)


def end_cluster(child: subprocess.Popen[bytes], directory: Path) -> None:
    """Let a process that keeps a cluster end that first, and itself."""
    (directory / "stop").touch()
    with suppress(subprocess.TimeoutExpired):
        child.wait(60)


@contextmanager
def cold_service() -> Iterator[ServiceProcess]:
    """A service on a cluster that is not its own."""
    port = free_port()
    env = {
        "RAY_AUTH_MODE": "disabled",
        "EVERSTEP_RECOVERY_WARM_POOL": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(Path.cwd()),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with scratch() as directory, ExitStack() as stack:
        command = ["-m", "benchmarks.cold_cluster", str(directory), "2", str(port)]
        cluster = stack.enter_context(process(command, directory / "cluster.log", env))
        stack.callback(end_cluster, cluster, directory)
        wait_for(
            lambda: (directory / "ready").exists() or cluster.poll() is not None,
            GIVE_UP_S,
            "the cluster",
        )
        arguments = ("--ray-address", f"http://127.0.0.1:{port}")
        yield stack.enter_context(
            ServiceProcess(nodes=1, args=arguments, env={"RAY_AUTH_MODE": "disabled"})
        )


# ---------------------------------------------------------------- torchrun elastic and plain Ray
# Train


def lines(directory: Path) -> list[dict[str, Any]]:
    """Every rank's steps; a line that is being written is left out."""
    texts = [
        text
        for path in (directory / "steps").glob("*.jsonl")
        for text in path.read_text().split("\n")[:-1]
    ]
    return sorted((json.loads(text) for text in texts), key=lambda line: line["at"])


def measure_lines(directory: Path, killed_at: float, dead_pids: set[int]) -> Recovery:
    """Wait until every rank of a new group has done a step, and compare with what was done
    before."""
    before = [line for line in lines(directory) if line["at"] <= killed_at]
    old_pids = {line["pid"] for line in before} | dead_pids

    def first_steps() -> list[dict[str, Any]] | None:
        firsts: dict[int, dict[str, Any]] = {}
        for line in lines(directory):
            if line["pid"] not in old_pids:
                firsts.setdefault(line["rank"], line)
        group = list(firsts.values())
        return group if group and len(group) == group[0]["world"] else None

    try:
        group = wait_for(first_steps, GIVE_UP_S, "the first new step")
    except TimeoutError:
        return GIVEN_UP
    done = max(line["step"] for line in before)
    return Recovery(
        max(line["at"] for line in group) - killed_at,
        done - (group[0]["step"] - 1),
        group[0]["world"],
    )


def settle(directory: Path) -> list[dict[str, Any]]:
    """Wait until training is under way; the newest line of each rank."""
    wait_for(
        lambda: any(line["step"] >= SETTLE_STEPS for line in lines(directory)),
        GIVE_UP_S,
        f"step {SETTLE_STEPS}",
    )
    newest = {line["rank"]: line for line in lines(directory)}
    return [newest[rank] for rank in sorted(newest)]


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        (directory / "steps").mkdir()
        yield directory


@contextmanager
def process(
    command: list[str], log: Path, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a session of its own; end it and everything below it afterwards."""
    with log.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, *command], stdout=out, stderr=out, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )  # fmt: skip
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                kill([child.pid])
        child.wait()


def is_open(port: int) -> bool:
    """Whether something listens on a port of loopback."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def torchrun(workload: str, what: str) -> Recovery:
    """Two agents stand for two nodes; the rendezvous is held by the one that lives."""
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    command = [
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "100",
    ]
    command += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        endpoint,
        "--rdzv-id",
        "bench",
        "-m",
        "benchmarks.elastic_torchrun",
        workload,
    ]
    with (
        scratch() as directory,
        process([*command, str(directory)], directory / "a.log") as first,
        ExitStack() as stack,
    ):
        # The agent that comes first holds the rendezvous; it is the one that has to live.
        wait_for(lambda: is_open(port), GIVE_UP_S, "the rendezvous")
        second = stack.enter_context(process([*command, str(directory)], directory / "b.log"))
        newest = settle(directory)
        worker_of = {
            pid: agent
            for agent in (first, second)
            for pid in [child.pid for child in psutil.Process(agent.pid).children(recursive=True)]
        }
        victim = next(line for line in reversed(newest) if worker_of[line["pid"]] is second)
        killed_at = kill([victim["pid"]] if what == "rank" else [second.pid])
        result = measure_lines(directory, killed_at, {victim["pid"]})
        (directory / "stop").touch()
        first.wait(60)
    return result


TORCHFT_TIMERS: dict[str, tuple[str, ...]] = {
    "torchft": (),
    "torchft, 1 s": ("--heartbeat_timeout_ms", "1000"),
}
"""Sides of torchft, with what their lighthouse is told."""


def torchft(workload: str, timers: tuple[str, ...]) -> Recovery:
    """Two replica groups of one process each; one dies, and later another takes its place. Nothing
    of torchft's stands beside a rank, so that a node's death is a rank's."""
    port = free_port()
    serve = str(Path(sys.executable).with_name("torchft_lighthouse"))
    command = [serve, "--bind", f"127.0.0.1:{port}", "--min_replicas", "1", *timers]
    with (
        scratch() as directory,
        process(command, directory / "lighthouse.log"),
        ExitStack() as stack,
    ):

        def start(number: int, log: str) -> subprocess.Popen[bytes]:
            arguments = [str(number), str(port), workload, str(directory)]
            command = ["-m", "benchmarks.elastic_torchft", *arguments]
            return stack.enter_context(process(command, directory / log))

        wait_for(lambda: is_open(port), 60, "the lighthouse")
        survivor, victim = start(0, "a.log"), start(1, "b.log")

        def steps(world: int, after: float) -> list[dict[str, Any]]:
            return [
                line
                for line in lines(directory)
                if line["pid"] == survivor.pid and line["world"] == world and line["at"] > after
            ]

        wait_for(lambda: len(steps(2, 0.0)) >= SETTLE_STEPS, GIVE_UP_S, "steps of both groups")
        killed_at = kill([victim.pid])
        try:
            first = wait_for(lambda: steps(1, killed_at), GIVE_UP_S, "a step of the survivor")[0]
        except TimeoutError:
            return GIVEN_UP
        wait_for(lambda: len(steps(1, killed_at)) >= SETTLE_STEPS, GIVE_UP_S, "steps of one group")
        started_at = time.time()
        start(1, "c.log")
        wait_for(
            lambda: len(steps(2, started_at)) >= SETTLE_STEPS, GIVE_UP_S, "steps of both again"
        )
        times = [line["at"] for line in steps(1, started_at) + steps(2, started_at)]
        (directory / "stop").touch()
        return Recovery(
            first["at"] - killed_at,
            0,
            1,
            max(later - earlier for earlier, later in itertools.pairwise(sorted(times))),
            first["dropped"],
        )


def plain_ray(workload: str, what: str) -> Recovery:
    with (
        scratch() as directory,
        process(
            ["-m", "benchmarks.elastic_ray", workload, str(directory), "2"],
            directory / "ray.log",
            {"RAY_AUTH_MODE": "disabled"},
        ) as driver,
    ):
        newest = settle(directory)
        victim = newest[-1]
        parent = psutil.Process(victim["pid"]).ppid()
        killed_at = kill([victim["pid"]] if what == "rank" else [parent])
        result = measure_lines(directory, killed_at, {victim["pid"]})
        (directory / "stop").touch()
        driver.wait(120)
    return result


def measure(side: str, workload: str, what: str, *, cold: bool) -> Recovery:
    """One kill; GIVEN_UP where the side did not come back from it. Raises TimeoutError where it did
    not get so far, or no further."""
    if side == "everstep":
        with cold_service() if cold else ServiceProcess(nodes=2) as service:
            return everstep(service, workload, what)
    if side in TORCHFT_TIMERS:
        return torchft(workload, TORCHFT_TIMERS[side])
    return {"torchrun": torchrun, "ray": plain_ray}[side](workload, what)


def main(argv: list[str]) -> None:
    every = ["everstep", *TORCHFT_TIMERS, "torchrun", "ray"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="digits")
    parser.add_argument("--kill", choices=["node", "rank"], action="append")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=every, action="append")
    parser.add_argument(
        "--cold", action="store_true", help="Everstep alone, on a cluster that is not its own"
    )
    options = parser.parse_args(argv)
    sides = ["everstep"] if options.cold else options.only or every
    if importlib.util.find_spec("torchft") is None:
        print("torchft is not installed, and left out: pip install --no-deps torchft==0.2.0")
        sides = [side for side in sides if side not in TORCHFT_TIMERS]
    results: dict[str, Any] = {}
    for what in options.kill or ["node", "rank"]:
        found: dict[str, list[Recovery]] = {side: [] for side in sides}
        for _ in range(options.repeats):
            for side in sides:
                found[side].append(measure(side, options.workload, what, cold=options.cold))
                print(what, side, found[side][-1], flush=True)
        results[what] = {
            side: {
                "recovery_s": summary([each.recovery_s for each in recoveries]),
                "steps_lost": [each.steps_lost for each in recoveries],
                "world_size_after": [each.world_size for each in recoveries],
                "batches_dropped": [each.batches_dropped for each in recoveries],
                "join_gap_s": [each.join_gap_s for each in recoveries],
            }
            for side, recoveries in found.items()
        }
    write("recovery_cold" if options.cold else "recovery", results)
