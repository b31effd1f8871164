"""Ranks as processes of this machine: the id of their run, their end, and plans of deaths."""

from __future__ import annotations

import atexit
import hashlib
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from train_fn.node.node_dir import shared_memory_root

DEADLINE_S = 120.0


def run_id_for(tmp_path: Path, name: str) -> str:
    """A run of its own; what it leaves in shared memory is removed when the tests end."""
    run_id = f"{name}-{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]}-{os.getpid()}"
    atexit.register(shutil.rmtree, shared_memory_root() / run_id, ignore_errors=True)
    return run_id


def run_to_end(
    ranks: list[Any], meanwhile: Callable[[list[Any]], None] = lambda ranks: None
) -> None:
    """Start the processes, call ``meanwhile`` with them, and wait until all have ended. Fail if one
    does not; none is left."""
    for process in ranks:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    try:
        meanwhile(ranks)
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
        assert not hung, f"ranks {hung} did not end within {DEADLINE_S} s"
    finally:
        for process in ranks:
            process.kill()
            process.join()


def wait_until_stopped(ranks: list[Any]) -> None:
    """Wait until these processes are stopped by a signal."""
    deadline = time.monotonic() + DEADLINE_S
    while any(psutil.Process(each.pid).status() != psutil.STATUS_STOPPED for each in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------- random plans

PLACES = ("forward", "backward", "gate", "torn", "committed", "copying")


@dataclass(frozen=True)
class Death:
    """What dies in an attempt, and where: the victim, and others at the same time."""

    nodes: tuple[str, ...]
    """Of all ranks of the attempt."""
    ranks: tuple[int, ...]
    """The victim first."""
    from_step: int
    place: str
    is_stopped: bool
    """By SIGSTOP; killed once all are stopped, as a controller does."""
    lost: str | None
    """Node whose memory is lost."""


def plan_of(
    seed: int,
    nodes: Sequence[str] = (),
    places: Sequence[str] = PLACES,
    epoch: int = 1,
) -> tuple[list[Death], tuple[str, ...]]:
    """Return deaths that must cost no reported step, one for each attempt, and the nodes of the
    attempt that ends. Even seeds keep the number of ranks.

    Args:
        nodes: of the first attempt; any by default.
        epoch: steps between two evaluations.

    After a node is lost, what it had is on one node until an attempt has passed its first gate: no
    other one is lost before.
    """
    rng = random.Random(seed)
    size = rng.randint(2, 5)
    some = [*"abcd"[: rng.randint(2, min(4, size))]]
    nodes = [*nodes] or sorted(some + rng.choices(some, k=size - len(some)))
    found: list[Death] = []
    step, newest, is_exposed, new = 0, 0, False, iter("efghijkl")
    for number in range(3):
        step += rng.randint(0 if number else 1, 3)
        place = rng.choice([*places, "moving", "moving"] if number else places)
        if place == "copying" and len({*nodes}) == 1:
            place = "committed"  # nothing is sent
        if place not in ("moving", "evaluation") and step > newest:  # it passes its first gate
            is_exposed = False
        may_lose = len({*nodes}) > 1 and not is_exposed
        if place != "moving":
            # that the next attempt may begin with
            newest = max(step, newest) + (epoch if place == "evaluation" else 1)
        victim = rng.randrange(len(nodes))
        mates = [at for at, node in enumerate(nodes) if node == nodes[victim] and at != victim]
        lost = nodes[victim] if may_lose and rng.random() < 0.6 else None
        if lost is None:
            mates = [at for at in range(len(nodes)) if at != victim and rng.random() < 0.3]
        ranks = (victim, *mates)
        found.append(Death(tuple(nodes), ranks, step, place, rng.random() < 0.25, lost))
        is_exposed = is_exposed or lost is not None
        replacement = next(new)
        nodes = [replacement if node == lost else node for node in nodes]
        if seed % 2:
            nodes = other_size(rng, nodes, replacement)
    return found, tuple(nodes)


def other_size(rng: random.Random, nodes: list[str], new: str) -> list[str]:
    """Return the nodes of a group that grew, shrank or stayed."""
    change = rng.choice([-1, 0, 1])
    if change > 0 and len(nodes) < 5:
        return [*nodes, new]
    gone = [at for at, node in enumerate(nodes) if nodes.count(node) > 1 or node == new]
    if change < 0 and len(nodes) > 2 and gone:
        del nodes[rng.choice(gone)]
    return nodes


def end_stopped(death: Death, ranks: list[Any]) -> None:
    """Kill what a death has stopped, once all of it is."""
    if death.is_stopped:
        wait_until_stopped([ranks[at] for at in death.ranks])
        for at in death.ranks:
            ranks[at].kill()
