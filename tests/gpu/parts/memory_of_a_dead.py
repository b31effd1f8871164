"""A process that holds most of the device's memory is killed, and the next one starts at once: it
waits until that memory is free, and gets as much."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from tests.gpu.verdict import Shown
from train_fn.node.memory import wait_for_free_memory

SHARE_HELD = 0.75
"""60 GB of a GPU with 80."""
ON_CPU_BYTES = 64 << 20


def run(device: torch.device, directory: Path) -> Shown:
    on_gpu = device.type == "cuda"
    num_bytes = int(SHARE_HELD * _total_bytes(device)) if on_gpu else ON_CPU_BYTES
    context = multiprocessing.get_context("spawn")
    (held, holding), (asked, answering) = context.Pipe(), context.Pipe()
    holder = context.Process(target=_hold, args=(str(device), num_bytes, holding))
    follower = context.Process(target=_follow, args=(str(device), num_bytes, answering))
    for process in (holder, follower):
        process.start()
    try:
        assert held.recv() == "held" and asked.recv() == "ready"
        os.kill(int(holder.pid or 0), signal.SIGKILL)
        asked.send("start")
        waited_s, problem = asked.recv()
    finally:
        for process in (holder, follower):
            process.kill()
            process.join()
    assert problem is None, f"after a wait of {waited_s:.2f} s: {problem}"
    return Shown(
        f"{num_bytes / 1e9:.2f} GB of a killed process were free to the next one after "
        f"{waited_s:.2f} s",
        "" if on_gpu else "the wait for a driver that frees a GPU's memory",
    )


def _total_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def _hold(device_name: str, num_bytes: int, pipe: Any) -> None:
    memory = torch.ones(num_bytes, dtype=torch.uint8, device=torch.device(device_name))
    assert int(memory[-1]) == 1
    pipe.send("held")
    time.sleep(3600)


def _follow(device_name: str, num_bytes: int, pipe: Any) -> None:
    """Be a rank that has torch imported and its device in use, as a warm process has."""
    device = torch.device(device_name)
    torch.zeros(1, device=device)
    pipe.send("ready")
    pipe.recv()
    began, problem = time.monotonic(), None
    wait_for_free_memory(device)
    waited_s = time.monotonic() - began
    try:
        memory = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        assert int(memory[-1]) == 1
    except (RuntimeError, AssertionError) as exc:
        problem = f"{type(exc).__name__}: {exc}"
    pipe.send((waited_s, problem))
