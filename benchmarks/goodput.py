"""Goodput under one random kill a minute: Everstep, torchft, torchrun elastic and plain Ray Train,
on one loop and machine.

    python -m benchmarks goodput --minutes 10

Two nodes of one CPU, one rank each. Every minute a rank or a whole node is killed, the same ones at
the same times on every side; a dead node is replaced 10 s later. Goodput is the share of the wall
time in which steps were made that the run kept: what is done again, and every second without a
step, counts as lost. The same arithmetic over each side's own record of its steps. torchft is
measured at its defaults, where it is installed; while one of its groups is dead, a step has half of
the batch, and ``steps_of_half_a_batch`` counts these.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from benchmarks.recovery import (
    GIVE_UP_S,
    agent,
    cancel,
    end_cluster,
    is_open,
    kill,
    lighthouse,
    lines,
    process,
    ray_node,
    replica_group,
    scratch,
)
from benchmarks.report import write
from benchmarks.steps import attempts_of
from benchmarks.workloads import WORKLOADS
from everstep.client.runs import RunHandle
from tests.support.service_process import ServiceProcess, free_port, wait_for

NODE_BACK_S = 10.0
"""From a node's death to the start of another."""
STEPS_BEFORE = 300
"""Steps before the clock starts: past start-up, which a run pays once."""
LAST_STEP_S = 120.0
"""Longest wait for a step after the end. A side that makes none in so long is down, and has
reported all its steps."""
RECENT_S = 3.0
"""A process that made a step within so long is a rank that runs."""


@dataclass(frozen=True)
class Point:
    """A step done: ``step`` counts from 1, ``group`` tells processes or attempts apart, ``at`` is
    in unix seconds."""

    group: int
    step: int
    at: float


@dataclass(frozen=True)
class Kill:
    """After ``after_s`` of the measured time, of a rank or a node; ``pick`` in [0, 1) chooses
    which."""

    after_s: float
    what: str
    pick: float


class Side(Protocol):
    """One of them, training."""

    def points(self) -> list[Point]:
        """Every step of which there is a record."""

    def kill(self, what: str, pick: float) -> bool:
        """Kill a rank or a node; False where there is none to kill."""

    def add_node(self) -> None:
        """Put another node in the place of one that was killed."""

    def facts(self) -> dict[str, Any]:
        """What it says of itself, beside the figures that all have in common."""


def plan(minutes: int, seed: int) -> list[Kill]:
    """One kill a minute, somewhere in the middle of it."""
    chosen = random.Random(seed)
    return [
        Kill(60 * minute + chosen.uniform(5, 35), chosen.choice(["rank", "node"]), chosen.random())
        for minute in range(minutes)
    ]


def productive_s(points: Sequence[Point], begin: float, end: float) -> tuple[float, int, int]:
    """Seconds in which steps were made that were kept, how many these are, and how many were done
    again.

    A step takes the time since the one before it in its group; the last that did a step is the one
    that counts.
    """
    ordered = sorted(points, key=lambda point: point.at)
    kept = {point.step: point for point in ordered}
    seconds, num_kept, num_again = 0.0, 0, 0
    for group in {point.group for point in ordered}:
        for earlier, point in itertools.pairwise(one for one in ordered if one.group == group):
            if earlier.at < begin or point.at > end:
                continue
            if kept[point.step] is point:
                seconds, num_kept = seconds + point.at - earlier.at, num_kept + 1
            else:
                num_again += 1
    return seconds, num_kept, num_again


def points_until(side: Side, end: float) -> list[Point]:
    """Steps done by ``end``, once the records hold them: they hold a later one, or the side makes
    none any more."""
    with suppress(TimeoutError):
        wait_for(
            lambda: any(point.at > end for point in side.points()),
            LAST_STEP_S,
            "a step after the end",
            every_s=1.0,
        )
    return [point for point in side.points() if point.at <= end]


def measure(side: Side, kills: Sequence[Kill], minutes: int) -> dict[str, Any]:
    """Let the kills happen, and look at what was made of the time."""
    wait_for(
        lambda: max((point.step for point in side.points()), default=0) >= STEPS_BEFORE,
        GIVE_UP_S,
        f"step {STEPS_BEFORE}",
    )
    begin = time.time()
    end = begin + 60 * minutes
    orders: list[tuple[float, Callable[[], object]]] = []
    done: list[dict[str, Any]] = []

    def strike(one: Kill) -> None:
        found = side.kill(one.what, one.pick)
        done.append({"after_s": round(time.time() - begin, 1), "what": one.what, "struck": found})
        if found and one.what == "node":
            orders.append((time.time() + NODE_BACK_S, side.add_node))

    orders += [(begin + one.after_s, lambda one=one: strike(one)) for one in kills]  # type: ignore[misc]
    while orders:
        orders.sort(key=lambda order: order[0])
        at, act = orders.pop(0)
        if at > end:
            break
        time.sleep(max(0.0, at - time.time()))
        act()
        print(f"{time.time() - begin:.0f} s: {done[-1] if done else ''}", flush=True)
    time.sleep(max(0.0, end - time.time()))
    seconds, num_kept, num_again = productive_s(points_until(side, end), begin, end)
    return {
        "goodput": round(seconds / (60 * minutes), 4),
        "steps_kept": num_kept,
        "steps_done_again": num_again,
        "kills": done,
        **side.facts(),
    }


# ---------------------------------------------------------------- Everstep


class Everstep:
    def __init__(self, service: ServiceProcess, run: RunHandle) -> None:
        self._service, self._run = service, run

    def points(self) -> list[Point]:
        return [Point(attempt, step, at) for (step, at), attempt in attempts_of(self._run).items()]

    def kill(self, what: str, pick: float) -> bool:
        attempts = self._run.attempts()
        workers = attempts[-1].workers if attempts else []
        if not workers:
            return False
        victim = workers[int(pick * len(workers))]
        nodes = {node["node_id"] for node in self._service.cluster()["nodes"]}
        if not psutil.pid_exists(victim.pid) or victim.node_id not in nodes:
            return False
        if what == "node":
            self._service.kill_node(victim.node_id)
        else:
            kill([victim.pid])
        return True

    def add_node(self) -> None:
        self._service.refill()

    def facts(self) -> dict[str, Any]:
        self._run.refresh()
        failures = [
            {
                "verdict": failure.verdict,
                "steps_lost": failure.steps_lost,
                "recovery_s": failure.recovery_s,
            }
            for failure in self._run.failures()
        ]
        return {
            "steps_lost": self._run.steps_lost,
            "failures": failures,
            "own_goodput": self._run.run.goodput,
        }


@contextmanager
def everstep(workload: dict[str, Any]) -> Iterator[Everstep]:
    spec = {**workload, "scaling": {"min_workers": 1, "max_workers": 2}}
    spec["train"] = {**spec["train"], "epochs": 100_000, "eval_every_epochs": 100_000}
    with ServiceProcess(nodes=2) as service:
        run = service.client().runs.create(spec)
        yield Everstep(service, run)
        cancel(run)


# ---------------------------------------------------------------- torchft, torchrun elastic and
# plain Ray Train


class Lines:
    """What they have in common: every rank writes a line a step."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def points(self) -> list[Point]:
        return [
            Point(line["pid"], line["step"], line["at"])
            for line in lines(self._directory)
            if line["rank"] == 0
        ]

    def facts(self) -> dict[str, Any]:
        return {}

    def running(self) -> list[int]:
        """Process ids of the ranks that make steps now, by rank."""
        newest = {
            line["pid"]: line
            for line in lines(self._directory)
            if line["at"] > time.time() - RECENT_S
        }
        return [
            pid
            for pid in sorted(newest, key=lambda pid: newest[pid]["rank"])
            if psutil.pid_exists(pid)
        ]


class Torchft(Lines):
    """Two replica groups of a process each. A rank that was killed starts again at once, as below
    an agent of torchrun."""

    def __init__(self, directory: Path, workload: str, stack: ExitStack) -> None:
        super().__init__(directory)
        self._workload, self._stack = workload, stack
        self._port = stack.enter_context(lighthouse((), directory))
        self._num_started = 0
        self._alive = {number: self._start(number) for number in range(2)}

    def points(self) -> list[Point]:
        """A step's first line. Steps of another number of groups are another group's, so that no
        pause is a step's time."""
        found: list[Point] = []
        world = group = 0
        for line in lines(self._directory):
            if not found or line["step"] > found[-1].step:
                group += line["world"] != world
                world = line["world"]
                found.append(Point(group, line["step"], line["at"]))
        return found

    def facts(self) -> dict[str, Any]:
        half = {line["step"] for line in lines(self._directory) if line["world"] == 1}
        return {"steps_of_half_a_batch": len(half)}

    def kill(self, what: str, pick: float) -> bool:
        running = [number for number, group in self._alive.items() if group.pid in self.running()]
        if not running:
            return False
        self._dead = running[int(pick * len(running))]
        kill([self._alive[self._dead].pid])
        if what == "rank":
            self.add_node()
        return True

    def add_node(self) -> None:
        self._alive[self._dead] = self._start(self._dead)

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        self._num_started += 1
        log = f"group-{self._num_started}"
        return self._stack.enter_context(
            replica_group(number, self._port, self._workload, self._directory, log)
        )


class Torchrun(Lines):
    """Two agents stand for two nodes; the one that holds the rendezvous is never killed, which
    torchrun would not survive."""

    def __init__(self, directory: Path, workload: str, stack: ExitStack) -> None:
        super().__init__(directory)
        self._endpoint_port = free_port()
        self._workload, self._stack = workload, stack
        self._num_agents = 0
        self._first = self._start()
        wait_for(lambda: is_open(self._endpoint_port), GIVE_UP_S, "the rendezvous")
        self._second = self._start()

    def kill(self, what: str, pick: float) -> bool:
        if what == "node":
            if self._second.poll() is not None:
                return False
            kill([self._second.pid])
            return True
        running = self.running()
        if running:
            kill([running[int(pick * len(running))]])
        return bool(running)

    def add_node(self) -> None:
        self._second = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._num_agents += 1
        log = f"agent-{self._num_agents}"
        return self._stack.enter_context(
            agent(self._endpoint_port, self._workload, self._directory, log)
        )


class PlainRay(Lines):
    def __init__(self, directory: Path, workload: str, stack: ExitStack) -> None:
        super().__init__(directory)
        self._stack = stack
        self._num_nodes = 2
        command = ["-m", "benchmarks.elastic_ray", workload, str(directory), "2"]
        driver = stack.enter_context(
            process(command, directory / "ray.log", {"RAY_AUTH_MODE": "disabled"})
        )
        stack.callback(end_cluster, driver, directory)

    def kill(self, what: str, pick: float) -> bool:
        running = self.running()
        if not running:
            return False
        victim = running[int(pick * len(running))]
        kill([psutil.Process(victim).ppid() if what == "node" else victim])
        return True

    def add_node(self) -> None:
        self._num_nodes += 1
        self._stack.enter_context(ray_node(self._directory, f"node-{self._num_nodes}"))


@contextmanager
def on_lines(make: Callable[[Path, str, ExitStack], Any], workload: str) -> Iterator[Any]:
    with scratch() as directory, ExitStack() as stack:
        side = make(directory, workload, stack)
        yield side
        (directory / "stop").write_text(str(lines(directory)[-1]["step"] + 100))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="digits")
    parser.add_argument("--minutes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    sides = ["everstep", "torchft", "torchrun", "ray"]
    parser.add_argument("--only", choices=sides, action="append")
    options = parser.parse_args(argv)
    kills = plan(options.minutes, options.seed)
    results: dict[str, Any] = {}
    if importlib.util.find_spec("torchft") is None:
        print("torchft is not installed, and left out: pip install --no-deps torchft==0.2.0")
        sides.remove("torchft")
    for name in options.only or sides:
        opened = {
            "everstep": lambda: everstep(WORKLOADS[options.workload]),
            "torchft": lambda: on_lines(Torchft, options.workload),
            "torchrun": lambda: on_lines(Torchrun, options.workload),
            "ray": lambda: on_lines(PlainRay, options.workload),
        }[name]
        with opened() as side:
            results[name] = measure(side, kills, options.minutes)
        print(name, results[name], file=sys.stderr, flush=True)
    write("goodput", results)
