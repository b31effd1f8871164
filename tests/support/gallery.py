"""Examples as programs of two ranks, as torchrun starts them: one rank is killed at a step of its
optimizer, and the program started again; a twin is left alone.

``python -m tests.support.gallery SCRIPT DIRECTORY RUN[=KILLED]…`` imports the script's libraries
once, and forks every rank of every run from there.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from tests.gpu.shared_gpu import share_gpu
from tests.support.own_loops import on_node
from train_fn.node.node_dir import shared_memory_root

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 150.0
DEVICE_VARIABLE = "GALLERY_DEVICE"
"""The device of all ranks, if it is no CPU: each is on a host of its own then, as NCCL sees it."""


@dataclass(frozen=True)
class Killed:
    """Where a rank ends itself with SIGKILL."""

    rank: int
    update: int
    """Optimizer steps that it began."""
    place: str
    """``before`` or ``after`` that optimizer step. Or ``node``: before it, with the memory of its
    node, on which no other rank is."""

    @classmethod
    def parse(cls, text: str) -> Killed:
        rank, update, place = text.split(",")
        return cls(int(rank), int(update), place)

    def __str__(self) -> str:
        return f"{self.rank},{self.update},{self.place}"


@dataclass(frozen=True)
class Finished:
    """A run of an example, from its beginning to its end, over all its starts."""

    restored: list[dict[str, Any]]
    losses: dict[int, float]
    weights: dict[str, Any]
    """Of the newest checkpoint."""
    step: int
    """Of the newest checkpoint."""
    metrics: list[dict[str, float]]
    told: Any
    """What the script wrote to ``RUN.json``; None if it wrote nothing."""
    log: str = ""
    """What the ranks of this run and its twins wrote to stderr, at last."""


def run_example(script: Path, directory: Path, killed: Killed) -> tuple[Finished, Finished]:
    """Run an example undisturbed, and with a rank killed. Return both runs."""
    whole, [broken] = run_with_twin(script, directory, [killed])
    return whole, broken


def run_with_twin(
    script: Path, directory: Path, kills: list[Killed], env: Mapping[str, str] | None = None
) -> tuple[Finished, list[Finished]]:
    """Run a script undisturbed, and once for each of ``kills``. Return all runs.

    Args:
        env: variables of all runs.
    """
    stem = f"{script.stem}-{os.getpid()}-{time.time_ns()}"
    broken = {f"{stem}-{at}": killed for at, killed in enumerate(kills)}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    try:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.support.gallery"),
                *(str(script), str(directory), stem),
                *(f"{name}={killed}" for name, killed in broken.items()),
            ],
            env=environment | dict(env or {}),
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S * (1 + len(kills)),
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        log = done.stderr[-8000:]
        whole, *others = [replace(finished(directory, name), log=log) for name in (stem, *broken)]
        return whole, others
    finally:
        for name in (stem, *broken):
            shutil.rmtree(shared_memory_root() / name, ignore_errors=True)


def finished(directory: Path, run_id: str) -> Finished:
    """Read what a run without a service left below a working directory."""
    found = finished_in(RunDir(open_storage(str(directory / "out" / "protect")), run_id))
    told = directory / f"{run_id}.json"
    return replace(found, told=json.loads(told.read_text()) if told.is_file() else None)


def finished_in(run_dir: RunDir) -> Finished:
    """Read what a run left."""
    import torch
    from safetensors.torch import load_file

    from train_fn.checkpoints.commit import MODEL_FILE, num_pieces
    from train_fn.checkpoints.sharded import join

    losses: dict[int, float] = {}
    metrics: dict[int, dict[str, float]] = {}
    for data in events(run_dir, EventKind.METRICS):
        for point in data["points"]:
            losses[point["step"]] = point["values"]["loss"]
            metrics[point["step"]] = point["values"]
    store = CheckpointStore(run_dir)
    newest = store.list()[-1]
    store.verify(newest.name)
    if num_pieces(newest):
        weights = load_file(join(Path(str(run_dir.local_path)) / "checkpoints" / newest.name))
    else:
        weights = torch.load(
            io.BytesIO(store.read_file(newest.name, MODEL_FILE)), weights_only=True
        )
    restored = events(run_dir, EventKind.RESTORED)
    points = [metrics[at] for at in sorted(metrics)]
    return Finished(restored, losses, weights, newest.step, points, None)


def events(run_dir: RunDir, kind: EventKind) -> list[dict[str, Any]]:
    found = []
    for submission in run_dir.submissions():
        cursor: str | None = None
        while True:
            batch, cursor = read_journal(run_dir, submission, cursor, 1000)
            found += [event.data for event in batch if event.kind is kind]
            if not batch:
                break
    return found


def main(script: str, directory: str, *runs: str) -> int:
    """Run the script as each of ``runs``, ``RUN`` alone or ``RUN=KILLED``."""
    from train_fn.user_code.modules import declare_missing_ops

    declare_missing_ops()
    import_libraries_of(Path(script))
    os.chdir(directory)
    for run in runs:
        run_id, _, killed = run.partition("=")
        for kill in [Killed.parse(killed), None] if killed else [None]:
            copy = Path(directory) / f"{run_id}.py"
            shutil.copyfile(script, copy)
            codes = start(copy, kill, beside=Path(script).parent, apart="node" in killed)
            if kill is not None and kill.place == "node":
                for place in (shared_memory_root() / run_id).glob(f"node{kill.rank}.*"):
                    shutil.rmtree(place)
            dead = [code == -signal.SIGKILL for code in codes]
            if kill is None and codes != [0, 0]:
                print(f"{run}: the ranks ended with {codes}", file=sys.stderr)
                return 1
            if kill is not None and (not dead[kill.rank] or codes[1 - kill.rank] == 0):
                print(f"{run}: the ranks ended with {codes}", file=sys.stderr)
                return 1
    return 0


def start(
    script: Path, killed: Killed | None, *, beside: Path, apart: bool = False
) -> list[int | None]:
    """Run two ranks of a script to their end. Return their exit codes.

    Args:
        beside: where the files lie that it imports.
        apart: whether each rank is on a node of its own.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=_rank_main, args=(script, beside, rank, port, killed, apart))
        for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in ranks:
        process.kill()
    return [process.exitcode for process in ranks]


def import_libraries_of(script: Path) -> None:
    """Import what a script imports at its top, but for its own names."""
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        else:
            continue
        for name in names:
            if importlib.util.find_spec(name.partition(".")[0]) is None:
                continue  # it lies beside the script
            module = importlib.import_module(name)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    getattr(module, alias.name, None)  # libraries load such names lazily
    importlib.import_module("train_fn.protect.door")
    importlib.import_module("torch._dynamo")


def _rank_main(
    script: Path, beside: Path, rank: int, port: int, killed: Killed | None, apart: bool
) -> None:
    if apart:
        on_node(f"node{rank}")
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if DEVICE_VARIABLE in os.environ:
        share_gpu()
        os.environ |= {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if killed is not None and killed.rank == rank:
        _die_at(killed)
    sys.argv = [str(script)]
    sys.path.insert(0, str(beside))
    runpy.run_path(str(script), run_name="__main__")


def _die_at(killed: Killed) -> None:
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    num_updates = 0

    def hook(*_: Any) -> None:
        nonlocal num_updates
        num_updates += 1
        if num_updates == killed.update:
            os.kill(os.getpid(), signal.SIGKILL)

    if killed.place in ("before", "node"):
        register_optimizer_step_pre_hook(hook)
    else:
        register_optimizer_step_post_hook(hook)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
