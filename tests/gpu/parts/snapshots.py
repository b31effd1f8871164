"""States of 1, 5 and 24 GB: from the device into pinned memory, straight into a snapshot, and back
on the device, with the seconds of each and every bit compared."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.gpu.alone import context_of, run_dir_in
from tests.gpu.verdict import Shown
from train_fn.context import WorkerContext
from train_fn.node.node_dir import shared_memory_root
from train_fn.snapshots.leaving import leave_snapshot, shortage
from train_fn.snapshots.store import snapshot_store
from train_fn.state.tensor_tree import copy_to_cpu

SIZES_BYTES = {"cuda": (1e9, 5e9, 24e9), "cpu": (1e6, 5e6, 24e6)}
TENSORS = 8


def run(device: torch.device, directory: Path) -> Shown:
    ctx = context_of(run_dir_in(directory), device)
    shown, left_out = [], []
    for step, num_bytes in enumerate(SIZES_BYTES[device.type], start=1):
        size = f"{num_bytes / 1e9:g} GB" if device.type == "cuda" else f"{num_bytes / 1e6:g} MB"
        state = _state(step, int(num_bytes), device)
        why = shortage(snapshot_store(ctx), state, 0)
        if why is not None:
            left_out.append(f"{size} ({why})")
            continue
        shown.append(f"{size}: {_there_and_back(ctx, state)}")
        del state
    assert shown, f"/dev/shm of {shutil.disk_usage(shared_memory_root()).free} bytes holds none"
    if device.type != "cuda":
        left_out.append("pinned memory, PCIe, 1 to 24 GB")
    return Shown("; ".join(shown), ", ".join(left_out))


def _there_and_back(ctx: WorkerContext, state: dict[str, Any]) -> str:
    """Return the seconds of each stage. Raise AssertionError for a bit that differs."""
    seconds: dict[str, float] = {}

    def timed(name: str, action: Callable[[], Any]) -> Any:
        began = time.monotonic()
        result = action()
        if ctx.device.type == "cuda":
            torch.cuda.synchronize(ctx.device)
        seconds[name] = time.monotonic() - began
        return result

    copied = timed("first copy", lambda: copy_to_cpu(state))
    timed("copy", lambda: copy_to_cpu(state, copied))
    problem = timed("leave", lambda: leave_snapshot(ctx, state))
    assert problem is None, problem
    [label] = snapshot_store(ctx).labels()
    read = timed("read", lambda: snapshot_store(ctx).read(label))
    back = timed(
        "load", lambda: {name: each.to(ctx.device) for name, each in read["model"].items()}
    )
    differing = [name for name, each in state["model"].items() if not torch.equal(each, back[name])]
    assert not differing, f"{differing} came back with other bits"
    return ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())


def _state(step: int, num_bytes: int, device: torch.device) -> dict[str, Any]:
    """Return a state of this size, with the parts of a rank's."""
    count = num_bytes // 4 // TENSORS
    weights = {str(number): torch.randn(count, device=device) for number in range(TENSORS)}
    others: dict[str, Any] = dict.fromkeys(("ledger", "fingerprint", "optimizer", "scaler", "ema"))
    return {"step": step, "model": weights, **others}
