"""Ranks over NCCL of which one holds the others up: torch's flight recorder names it, and whoever
waits for it is let go by an abort and believes nothing."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu.parts.nccl_abort import SPIN_S, hang
from tests.gpu.shared_gpu import share_gpu
from tests.gpu.verdict import Shown
from train_fn.errors import PeersGone
from train_fn.recovery.hang import CollectiveCounts, find_late
from train_fn.recovery.settings import NCCL_ENV
from train_fn.step import nccl
from train_fn.step.nccl import collective_counts
from train_fn.step.peers import Peers, end_process_group

WORLD_SIZE, LATE = 3, 1
BEFORE = 3
"""Collectives that all ranks make."""
ENDS_S = 90.0


def run(device: torch.device, directory: Path) -> Shown:
    on_gpu = device.type == "cuda"
    skipped = _hung("skips", device, directory)
    raised = _hung("raises", device, directory)
    facts = [f"who skipped a collective was named ({skipped})", f"who raised: {raised}"]
    if on_gpu:
        facts.append(f"whose device spins: {_hung('spins', device, directory)}")
    return Shown("; ".join(facts), "" if on_gpu else "NCCL's records, a device that spins")


def _hung(what: str, device: torch.device, directory: Path) -> str:
    """Let the late rank do ``what`` while the others wait for it. Return what was found."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(WORLD_SIZE)
    ranks, pipes = [], []
    for rank in range(WORLD_SIZE):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (what, rank, str(directory / f"{what}.store"), str(device), barrier, sender)
        ranks.append(context.Process(target=_rank_main, args=arguments))
        ranks[-1].start()
        sender.close()
        pipes.append(receiver)
    try:
        told = [pipe.recv() if pipe.poll(ENDS_S) else None for pipe in pipes]
    except EOFError:
        raise AssertionError(f"a rank ended early while one {what}") from None
    finally:
        for process in ranks:
            process.join(SPIN_S + 5)
            process.kill()
    assert None not in told, f"no answer while one {what}: {told}"
    counts: dict[int, CollectiveCounts | None] = {
        rank: each["counts"] for rank, each in enumerate(told)
    }
    late = find_late(counts)
    assert late == [LATE] or (what != "skips" and late == []), f"{late} are called late: {counts}"
    freed = [each["freed_s"] for rank, each in enumerate(told) if rank != LATE]
    assert None not in freed, f"an aborted sum was believed while one {what}: {told}"
    return f"late {late}, the others freed {max(freed):.2f} s after the abort"


def _rank_main(
    what: str, rank: int, store: str, device_name: str, barrier: Any, sender: Any
) -> None:
    device = torch.device(device_name)
    os.environ.update(NCCL_ENV)
    share_gpu()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        nccl.group_backend(device),
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD_SIZE,
    )
    nccl.begin_attempt()
    peers, numbers = Peers(rank, WORLD_SIZE, device), torch.ones(1 << 20, device=device)
    for _ in range(BEFORE):
        work = peers.start_sum(numbers)
        assert work is not None
        work.wait()
        peers.result(numbers[:1])
    barrier.wait(ENDS_S)
    found: dict[str, Any] = {"freed_s": None}
    if rank != LATE:
        work = peers.start_sum(numbers)
    elif what == "spins":
        hang(device)
        work = peers.start_sum(numbers)
    elif what == "raises":
        end_process_group()
    if rank != LATE and device.type == "cuda" and what == "spins":
        began = time.monotonic()
        while _started() < BEFORE + 1 and time.monotonic() < began + SPIN_S / 3:
            time.sleep(0.02)
    barrier.wait(ENDS_S)
    found["counts"] = collective_counts()
    print(f"{what}: rank {rank} has {found['counts']}", flush=True)
    barrier.wait(ENDS_S)
    if rank != LATE:
        found["freed_s"] = _freed_s(peers, numbers, work)
    sender.send(found)
    os._exit(0)  # nothing may wait for what hangs


def _started() -> int:
    counts = collective_counts()
    return -1 if counts is None else counts.started


def _freed_s(peers: Peers, numbers: torch.Tensor, work: Any) -> float | None:
    """Abort what this rank waits for. Return the seconds until its sum was refused; None if it was
    believed."""
    began = time.monotonic()
    if nccl.fails_by_itself():
        end_process_group()  # as the ranks of gloo do
    else:
        nccl.abort_collectives()
    try:
        work.wait()
        peers.result(numbers)
    except (PeersGone, RuntimeError):
        return time.monotonic() - began
    return None
