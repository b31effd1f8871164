"""From the SIGKILL of a node or a rank to the next step: Everstep, torchft, torchrun elastic and
plain Ray Train, on one loop and machine.

    python -m benchmarks recovery --repeats 5 --kill node

Two nodes of one CPU, one rank each; the same model, data and checkpoint interval. Seconds run from
the kill to the first new step of all ranks that go on; steps lost are those that had been done and
are done again. After ALONE_STEPS more steps a newcomer takes a dead node's place: ``full_size_s``
runs from its start to the first step of all ranks, ``join_gap_s`` is how long it stopped the
others, ``again_at_join`` are the steps that are done again for it. Every side then trains to an
agreed step, and once more without a kill: ``samples_not_once`` counts the samples of finished
epochs that the final weights used twice or never, and ``difference`` is the largest between the
weights of the two.

torchft, alone and below Ray's ``TorchftConfig``, is measured where it is installed (``pip install
--no-deps torchft==0.2.0``). For it the batches are counted that no step has used. With ``--cold``
Everstep runs on a cluster that somebody else set up: without preloaded modules and without spare
processes.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.elastic_loop import samples
from benchmarks.report import summary, write
from benchmarks.steps import STEPS_AFTER, around, longest_gap, points
from benchmarks.workloads import WORKLOADS, build_train_set
from everstep.client.runs import RunHandle
from tests.support.service_process import ServiceProcess, free_port, wait_for

SETTLE_STEPS = 325
"""Steps before the kill: past start-up and the first checkpoints, half-way to the next."""
ALONE_STEPS = 100
"""Steps after the recovery before a newcomer comes."""
EXACTNESS = {"everstep": "world_size", "everstep, elastic": "elastic"}
"""Sides of Everstep, with their ``train.exactness``."""
LAST_STEP = 1500
"""Of Everstep, whose runs say beforehand where they end."""
GIVE_UP_S = 240.0


@dataclass(frozen=True)
class Ended:
    """What a training had made of its samples and weights at a step."""

    step: int
    weights: dict[str, torch.Tensor] = field(repr=False)
    samples_not_once: int
    """Samples of finished epochs that the weights used more than once or never."""
    step_ms: float
    """Median of the steps before SETTLE_STEPS, once it is under way."""


@dataclass(frozen=True)
class Recovery:
    recovery_s: float
    steps_lost: int | None
    """None, as the size, where training did not come back while it was waited for."""
    world_size: int | None
    batches_dropped: int = 0
    full_size_s: float | None = None
    """From a newcomer's start to a step of all; None, as the next, where that was not tried."""
    join_gap_s: float | None = None
    """Longest time between two steps while a newcomer enters."""
    again_at_join: int | None = None
    ended: Ended | None = None


Process = AbstractContextManager[subprocess.Popen[bytes]]


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


def started(service: ServiceProcess, workload: str, exactness: str) -> RunHandle:
    spec = {**WORKLOADS[workload], "scaling": {"min_workers": 1, "max_workers": 2}}
    spec["train"] = {**spec["train"], "max_steps": LAST_STEP, "exactness": exactness}
    return service.client().runs.create(spec)


def everstep(service: ServiceProcess, workload: str, exactness: str, what: str) -> Recovery:
    run = started(service, workload, exactness)
    wait_for(
        lambda: run.refresh().step >= SETTLE_STEPS, GIVE_UP_S, f"step {SETTLE_STEPS} of {run.id}"
    )
    attempt = run.attempts()[-1]
    victim = attempt.workers[-1]
    is_own = (service.home / "cluster.json").exists()
    if what == "rank":
        killed_at = kill([victim.pid])
    elif is_own:
        [node] = [node for node in service.cluster()["nodes"] if node["node_id"] == victim.node_id]
        killed_at = kill([node["raylet_pid"]])
    else:
        killed_at = kill([psutil.Process(victim.pid).ppid()])
    wait_for(
        lambda: run.refresh().attempt > attempt.attempt and run.status == "RUNNING",
        GIVE_UP_S,
        "the recovery",
    )
    _, (first_step, first_at) = around(run, attempt.attempt, killed_at, GIVE_UP_S)
    failure, after = run.failures()[0], run.attempts()[-1]
    assert failure.steps_lost is not None
    joined: tuple[float, float, int] | tuple[()] = ()
    if what == "node" and is_own:
        wait_for(
            lambda: run.refresh().step >= first_step + ALONE_STEPS, GIVE_UP_S, "steps of one rank"
        )
        joined = newcomer(service, run, victim.node_id)
    if not is_own:
        cancel(run)
    recovery = Recovery(first_at - killed_at, failure.steps_lost, after.world_size, 0, *joined)
    return replace(recovery, ended=ended(run) if is_own else None)


def ended(run: RunHandle) -> Ended:
    """Wait until a run has ended by itself."""
    run.wait(2 * GIVE_UP_S)
    assert run.checkpoint().step == LAST_STEP
    with scratch() as directory:
        run.download_checkpoint("latest", directory / "last")
        weights = torch.load(directory / "last" / "model.pt", weights_only=True)
    epochs = run.samples().epochs
    seen = sorted({step: at for _, (step, at) in points(run, 0.0)}.items())
    return Ended(
        LAST_STEP, weights, sum(epoch.duplicates + epoch.missing for epoch in epochs), step_ms(seen)
    )


def step_ms(times: list[tuple[int, float]]) -> float:
    """Return the median time of the steps before a kill, from (step, seconds) in order."""
    found = [at for step, at in times if SETTLE_STEPS - 225 <= step < SETTLE_STEPS]
    return 1000 * statistics.median(after - before for before, after in itertools.pairwise(found))


def cancel(run: RunHandle) -> None:
    """Cancel a run, and wait until it is."""
    run.cancel()
    wait_for(lambda: run.refresh().status == "CANCELLED", GIVE_UP_S, "the cancel")


def newcomer(service: ServiceProcess, run: RunHandle, dead: str) -> tuple[float, float, int]:
    """Replace the node; seconds until the run has grown onto the new one, the longest time between
    two steps until then, and no step that is done again."""
    wait_for(
        lambda: dead not in {node["node_id"] for node in service.cluster()["nodes"]},
        GIVE_UP_S,
        "the keeper's notice",
    )
    began, attempt = time.time(), run.attempts()[-1].attempt
    service.refill()
    gap_s = longest_gap(run, attempt, began, GIVE_UP_S)
    (last, _), (first, at) = around(run, attempt, began, GIVE_UP_S)
    return at - began, gap_s, last - (first - 1)


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


# ---------------------------------------------------------------- torchrun elastic, torchft and
# Ray Train


def lines(directory: Path) -> list[dict[str, Any]]:
    """Every rank's steps; a line that is being written is left out."""
    texts = [
        text
        for path in (directory / "steps").glob("*.jsonl")
        for text in path.read_text().split("\n")[:-1]
    ]
    return sorted((json.loads(text) for text in texts), key=lambda line: line["at"])


def reach(directory: Path, step: int) -> None:
    """Wait until the newest step is this one or a later one."""
    wait_for(
        lambda: any(line["step"] >= step for line in lines(directory)[-1:]),
        GIVE_UP_S,
        f"step {step}",
        every_s=0.5,
    )


def settle(directory: Path) -> list[dict[str, Any]]:
    """Wait until training is under way; the newest line of each rank."""
    reach(directory, SETTLE_STEPS)
    newest = {line["rank"]: line for line in lines(directory)}
    return [newest[rank] for rank in sorted(newest)]


def first_step(
    directory: Path, after: float, world: int | None, but: set[int], what: str
) -> tuple[float, int, int]:
    """Wait for the first step, since a time, of all ranks of a group of ``world``, or of any size
    without the processes of ``but``; when the last rank did it, the step, and the group's size."""

    def found() -> list[dict[str, Any]] | None:
        firsts: dict[int, dict[str, Any]] = {}
        for line in lines(directory):
            if line["at"] > after and line["pid"] not in but and world in (None, line["world"]):
                firsts.setdefault(line["rank"], line)
        group = list(firsts.values())
        return group if group and len(group) == group[0]["world"] else None

    group = wait_for(found, GIVE_UP_S, what, every_s=0.2)
    return max(line["at"] for line in group), group[0]["step"], group[0]["world"]


def counted(directory: Path, through_step: int, workload: str) -> Counter[tuple[int, int]]:
    """Return how often the weights of a step used each (epoch, sample).

    Of a step that was done again, the last time counts, and its group.
    """
    newest: dict[tuple[int, int], dict[str, Any]] = {}
    world: dict[int, int] = {}
    for line in lines(directory):
        newest[line["step"], line["rank"]] = line
        world[line["step"]] = line["world"]
    num_samples = len(build_train_set(WORKLOADS[workload]))
    size = WORKLOADS[workload]["train"]["global_batch_size"]
    found: Counter[tuple[int, int]] = Counter()
    for step in range(1, through_step + 1):
        for rank in range(world[step]):
            if (step, rank) in newest:
                line = newest[step, rank]
            else:  # its gradients were used, but it died before it wrote the line
                before = newest[step - 1, rank]
                line = {**before, "batch": before["batch"] + 1}
                if not samples(line, num_samples, size):
                    line = {**before, "epoch": before["epoch"] + 1, "batch": 0}
            found.update((line["epoch"], sample) for sample in samples(line, num_samples, size))
    return found


def lines_end(directory: Path, step: int, workload: str) -> Ended:
    """Wait until training has ended with a step, which ``DIRECTORY/stop`` names."""
    path = directory / f"weights-{step}.pt"

    def is_done() -> bool:
        found = [line for line in lines(directory) if line["step"] == step]
        return path.exists() and bool(found) and len(found) >= found[-1]["world"]

    wait_for(is_done, GIVE_UP_S, f"step {step}", every_s=0.5)
    counts = counted(directory, step, workload)
    num_samples = len(build_train_set(WORKLOADS[workload]))
    finished = min(line["epoch"] for line in lines(directory) if line["step"] == step)
    not_once = sum(
        counts[epoch, sample] != 1 for epoch in range(finished) for sample in range(num_samples)
    )
    times = {line["step"]: line["at"] for line in lines(directory) if line["rank"] == 0}
    weights = torch.load(path, weights_only=True)
    return Ended(step, weights, not_once, step_ms(sorted(times.items())))


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


def agent(port: int, workload: str, directory: Path, log: str) -> Process:
    """One torchrun agent, which stands for a node."""
    command = ["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--max-restarts", "1000", "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    command += ["-m", "benchmarks.elastic_torchrun", workload, str(directory)]
    return process(command, directory / f"{log}.log")


def ray_node(directory: Path, log: str) -> Process:
    """Another node of the cluster of ``benchmarks.elastic_ray``."""
    command = ["-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]
    command += ["start", "--address", (directory / "address").read_text(), "--num-cpus", "1"]
    command += ["--resources", '{"node": 1}', "--block"]
    return process(command, directory / f"{log}.log", {"RAY_AUTH_MODE": "disabled"})


@dataclass(frozen=True)
class Training:
    """A side that writes lines, under way in a directory."""

    victims: Callable[[str], list[int]]
    """Processes to kill for a rank or a node."""
    add: Callable[[], Process]
    """Start what stands for a node."""
    survivors_stay: bool
    """Whether the others go on in their processes."""


@contextmanager
def torchrun(workload: str, directory: Path) -> Iterator[Training]:
    """Two agents stand for two nodes; the rendezvous is held by the one that lives."""
    port = free_port()
    with agent(port, workload, directory, "a"), ExitStack() as stack:
        # The agent that comes first holds the rendezvous; it is the one that has to live.
        wait_for(lambda: is_open(port), GIVE_UP_S, "the rendezvous")
        second = stack.enter_context(agent(port, workload, directory, "b"))

        def victims(what: str) -> list[int]:
            below = [child.pid for child in psutil.Process(second.pid).children(recursive=True)]
            newest = settle(directory)
            return (
                [line["pid"] for line in newest if line["pid"] in below]
                if what == "rank"
                else [second.pid]
            )

        yield Training(victims, lambda: agent(port, workload, directory, "c"), False)


TORCHFT_TIMERS: dict[str, tuple[str, ...]] = {
    "torchft": (),
    "torchft, 1 s": ("--heartbeat_timeout_ms", "1000"),
}
"""Sides of torchft, with what their lighthouse is told."""


@contextmanager
def lighthouse(timers: tuple[str, ...], directory: Path) -> Iterator[int]:
    """Run torchft's lighthouse; its port."""
    port = free_port()
    serve = directory / "lighthouse.py"  # it reads its arguments after a script's name alone
    serve.write_text("from torchft._torchft import lighthouse_main\n\nlighthouse_main()\n")
    command = [str(serve), "--bind", f"127.0.0.1:{port}", "--min_replicas", "1", *timers]
    with process(command, directory / "lighthouse.log"):
        wait_for(lambda: is_open(port), GIVE_UP_S, "the lighthouse")
        yield port


def replica_group(number: int, port: int, workload: str, directory: Path, log: str) -> Process:
    """One replica group of torchft, which is a process."""
    arguments = [str(number), str(port), workload, str(directory)]
    return process(["-m", "benchmarks.elastic_torchft", *arguments], directory / log)


@contextmanager
def torchft(timers: tuple[str, ...], workload: str, directory: Path) -> Iterator[Training]:
    """Two replica groups of one process each; one dies, and later another takes its place. Nothing
    of torchft's stands beside a rank, so that a node's death is a rank's."""
    with lighthouse(timers, directory) as port:

        def start(number: int, log: str) -> Process:
            return replica_group(number, port, workload, directory, log)

        with start(0, "a.log"), start(1, "b.log") as victim:
            yield Training(lambda _: [victim.pid], lambda: start(1, "c.log"), True)


@contextmanager
def plain_ray(arguments: list[str], workload: str, directory: Path) -> Iterator[Training]:
    command = ["-m", "benchmarks.elastic_ray", workload, str(directory), "2", *arguments]
    with process(command, directory / "ray.log", {"RAY_AUTH_MODE": "disabled"}) as driver:

        def victims(what: str) -> list[int]:
            victim: int = settle(directory)[-1]["pid"]
            return [victim if what == "rank" else psutil.Process(victim).ppid()]

        try:
            yield Training(victims, lambda: ray_node(directory, "node"), bool(arguments))
        finally:
            end_cluster(driver, directory)


SIDES: dict[str, Callable[[str, Path], AbstractContextManager[Training]]] = {
    **{name: functools.partial(torchft, timers) for name, timers in TORCHFT_TIMERS.items()},
    "torchrun": torchrun,
    "ray": functools.partial(plain_ray, []),
    "ray, torchft": functools.partial(plain_ray, ["torchft"]),
}


def killed(side: str, workload: str, what: str) -> Recovery:
    """Kill a rank or a node of a side that writes lines, put another in its place, and let it end.

    GIVE_UP_S where it did not come back within that. What did not happen later is left out.
    """
    with scratch() as directory, SIDES[side](workload, directory) as training, ExitStack() as stack:
        settle(directory)
        killed_at = kill(training.victims(what))
        before = [line for line in lines(directory) if line["at"] <= killed_at]
        world = 1 if training.survivors_stay else None
        but = set() if training.survivors_stay else {line["pid"] for line in before}
        recovery = Recovery(GIVE_UP_S, None, None)
        try:
            at, first, size = first_step(directory, killed_at, world, but, "a step afterwards")
            lost = max(line["step"] for line in before) - (first - 1)
            dropped = max(line.get("dropped", 0) for line in lines(directory))
            recovery = Recovery(at - killed_at, max(lost, 0), size, dropped)
            if size == 1 and (what == "node" or side in TORCHFT_TIMERS):
                reach(directory, first + ALONE_STEPS)
                recovery = replace(recovery, **joined(directory, training, stack))
            end = lines(directory)[-1]["step"] + ALONE_STEPS
            (directory / "stop").write_text(str(end))
            return replace(recovery, ended=lines_end(directory, end, workload))
        except TimeoutError as exc:
            print(f"{side} is measured up to here: {exc}", flush=True)
            return recovery


def joined(directory: Path, training: Training, stack: ExitStack) -> dict[str, Any]:
    """Start a newcomer and wait for steps of all ranks; what it cost."""
    began = time.time()
    stack.enter_context(training.add())
    at, first, _ = first_step(directory, began, 2, set(), "a step of all ranks")
    through = first + STEPS_AFTER
    reach(directory, through)
    mine = [line for line in lines(directory) if line["rank"] == 0 and line["at"] > began]
    alone = max(line["step"] for line in mine if line["at"] < at and line["world"] == 1)
    times = [line["at"] for line in mine if line["at"] <= at or line["step"] <= through]
    gap_s = max(later - earlier for earlier, later in itertools.pairwise(times))
    return {
        "full_size_s": at - began,
        "join_gap_s": gap_s,
        "again_at_join": alone - (first - 1),
    }


def measure(side: str, workload: str, what: str, *, cold: bool) -> Recovery:
    """One kill. Raises TimeoutError where the side did not get so far."""
    if side in EXACTNESS:
        with cold_service() if cold else ServiceProcess(nodes=2) as service:
            return everstep(service, workload, EXACTNESS[side], what)
    return killed(side, workload, what)


def undisturbed(side: str, workload: str, ends: list[int]) -> dict[int, Ended]:
    """Train without a kill; what it had come to at each of these steps."""
    if side in EXACTNESS:
        with ServiceProcess(nodes=2) as service:
            return {LAST_STEP: ended(started(service, workload, EXACTNESS[side]))}
    with scratch() as directory:
        (directory / "stop").write_text(" ".join(map(str, ends)))
        with SIDES[side](workload, directory):
            wait_for(
                (directory / f"weights-{max(ends)}.pt").exists,
                2 * GIVE_UP_S,
                "the last step",
                every_s=0.5,
            )
            return {end: lines_end(directory, end, workload) for end in ends}


def compared(found: list[Ended], twin: dict[int, Ended]) -> dict[str, Any]:
    """Compare trainings with one that nothing disturbed."""
    differences = [
        max(
            float((each.weights[name] - value).abs().max())
            for name, value in twin[each.step].weights.items()
        )
        for each in found
    ]
    return {
        "ended_at_step": [each.step for each in found],
        "samples_not_once": [each.samples_not_once for each in found],
        "samples_not_once_undisturbed": [twin[each.step].samples_not_once for each in found],
        "difference": differences,
        "undisturbed_step_ms": round(next(iter(twin.values())).step_ms, 2),
    }


def main(argv: list[str]) -> None:
    every = [*EXACTNESS, *SIDES]
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
        sides = [side for side in sides if "torchft" not in side]
    results: dict[str, Any] = {}
    for what in options.kill or ["node", "rank"]:
        found: dict[str, list[Recovery]] = {side: [] for side in sides}
        for _ in range(options.repeats):
            for side in sides:
                found[side].append(measure(side, options.workload, what, cold=options.cold))
                load = round(os.getloadavg()[0], 1)
                print(what, f"{side}, load {load}:", found[side][-1], flush=True)
        results[what] = {
            side: {
                "recovery_s": summary([each.recovery_s for each in recoveries]),
                "steps_lost": [each.steps_lost for each in recoveries],
                "world_size_after": [each.world_size for each in recoveries],
                "batches_dropped": [each.batches_dropped for each in recoveries],
                "full_size_s": [each.full_size_s for each in recoveries],
                "join_gap_s": [each.join_gap_s for each in recoveries],
                "again_at_join": [each.again_at_join for each in recoveries],
            }
            for side, recoveries in found.items()
        }
        for side, recoveries in found.items():
            if ends := [each.ended for each in recoveries if each.ended is not None]:
                twin = undisturbed(side, options.workload, [each.step for each in ends])
                results[what][side].update(compared(ends, twin))
    write("recovery_cold" if options.cold else "recovery", results)
