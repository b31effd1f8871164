"""A device that hangs: the state is copied beside it and left on the node, and a collective that
another thread aborts is not believed.

On a GPU a kernel spins, over NCCL with a world of one. On a CPU the host sleeps, over the backend
that hangs as NCCL does.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.alone import begin, context_of, run_dir_in
from tests.gpu.verdict import Shown
from tests.integration.trainees import Regression
from tests.support.silent_backend import claim_cpu
from train_fn.errors import PeersGone
from train_fn.loop import attempt, build
from train_fn.recovery.evidence import StepFailed
from train_fn.snapshots.store import snapshot_store
from train_fn.step import nccl
from train_fn.step.peers import Peers, end_process_group

SPIN_S = 5.0
CYCLES_PER_S = 2e9
"""More than any GPU's clock, so that a kernel spins for ``SPIN_S`` at least."""
HANGS_IN_PASS = 8


class Hanging(Regression):
    """Hangs the device in one of its passes, and has another thread abort meanwhile."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._passes = device, 0
        self.abort = lambda: None

    def build_model(self) -> torch.nn.Module:
        """Return a model with buffers that passes change, and one that they do not."""
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.Tanh(),
            torch.nn.Linear(16, 1),
        )
        model.register_buffer("unchanged", torch.ones(3))
        return model

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._passes += model.training
        if self._passes == HANGS_IN_PASS:
            threading.Timer(0.5, self.abort).start()
            faulthandler.dump_traceback_later(SPIN_S / 2)  # for the log, if the state is not kept
            hang(self._device)
        return super().loss(model, batch)


def hang(device: torch.device) -> None:
    """Let the device do nothing else for ``SPIN_S``. The host of a GPU runs ahead of it."""
    if device.type == "cuda":
        torch.cuda._sleep(int(SPIN_S * CYCLES_PER_S))
    else:
        time.sleep(SPIN_S)


def run(device: torch.device, directory: Path) -> Shown:
    if device.type == "cpu":
        claim_cpu()
    kept = _keep_beside_a_hang(device, directory)
    aborted = _abort_a_collective(device)
    return Shown(
        f"{kept}; {aborted}",
        "a peer that is gone, which takes two GPUs"
        if device.type == "cuda"
        else "NCCL, a side stream, a kernel that spins",
    )


def _keep_beside_a_hang(device: torch.device, directory: Path) -> str:
    """Have the loop hang in a step, and abort from another thread."""
    found: dict[str, Any] = {}
    task = Hanging(device)
    build.build_task = lambda spec: task
    begin(device)
    ctx = context_of(run_dir_in(directory), device)

    def abort() -> None:
        began = time.monotonic()
        nccl.abort_collectives()
        found["abort_s"] = time.monotonic() - began

    def report_kept(step: int) -> None:
        store = snapshot_store(ctx)
        found["kept"], found["at"] = step, time.monotonic()
        found["readable"] = [store.read(label)["step"] for label in store.labels()]

    task.abort = abort  # type: ignore[method-assign]
    try:
        attempt.train(dataclasses.replace(ctx, report_kept=report_kept))
    except StepFailed as exc:
        assert exc.error.collateral, exc.error.summary
    ahead_s = time.monotonic() - found.get("at", float("inf"))
    faulthandler.cancel_dump_traceback_later()
    assert ahead_s > SPIN_S / 2, f"the state was not kept while the device hung: {found}"
    assert found["kept"] in found["readable"], f"{found['readable']} can be read"
    return (
        f"step {found['kept']} was kept {ahead_s:.1f} s before the device went on; the abort took "
        f"{found['abort_s']:.2f} s"
    )


def _abort_a_collective(device: torch.device) -> str:
    """Abort a sum that has not ended, from another thread."""
    end_process_group()
    nccl.begin_attempt()
    size = 1 if device.type == "cuda" else 2  # on the CPU the peer never comes
    backend = nccl.group_backend(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=size)
    peers, numbers = Peers(0, 2, device), torch.ones(1 << 20, device=device)
    if device.type == "cuda":
        dist.all_reduce(torch.ones(1, device=device))  # creates the communicator
        hang(device)
    thread, began = threading.Timer(0.5, nccl.abort_collectives), time.monotonic()
    thread.start()
    try:
        work = peers.start_sum(numbers)
        if work is not None:
            work.wait()
        peers.result(numbers)
    except PeersGone:
        seconds = time.monotonic() - began
    else:
        raise AssertionError(f"the sum of an aborted communicator of {backend} was believed")
    thread.join()
    began = time.monotonic()
    end_process_group()
    return (
        f"an aborted sum over {backend} was refused after {seconds:.1f} s, and the group ended in "
        f"{time.monotonic() - began:.2f} s"
    )
