"""A rank whose GPU is not the node's lowest: the look at its node comes before it sees the GPUs of
the other ranks, and it still finds its own. ``nvidia-smi`` names the GPU that torch uses."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.gpu.verdict import Shown
from train_fn.node.device import look_at_gpu, visible_gpu
from train_fn.node.preflight import check_own

MOST_ORDERS = 6


def run(device: torch.device, directory: Path) -> Shown:
    count = torch.cuda.device_count() if device.type == "cuda" else 2
    orders = list(itertools.permutations(range(count)))[-MOST_ORDERS:]
    names = [",".join(map(str, order)) for order in orders]
    if device.type == "cuda":
        uuid = torch.cuda.get_device_properties(0).uuid
        names.append(f"GPU-{uuid}")
    for visible in names:
        answer = subprocess.run(
            [sys.executable, "-m", __name__, device.type, visible],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert answer.returncode == 0, f"with {visible}: {answer.stderr[-600:]}"
        problems = json.loads(answer.stdout.strip().rpartition("\n")[2])
        assert problems == [], f"with CUDA_VISIBLE_DEVICES={visible}: {problems}"
    return Shown(
        f"the look at the node, the rank's device and nvidia-smi agree with {'; '.join(names)}",
        _not_run(device, count),
    )


def _not_run(device: torch.device, count: int) -> str:
    if device.type != "cuda":
        return "real devices and nvidia-smi"
    return "" if count > 1 else "another order than that of the node, which takes two GPUs"


def problems_as_a_rank(device_type: str, visible: str) -> list[str]:
    """Be a rank of the last GPU in ``visible``. Ray shows it that one first, and those of the
    node's other ranks later."""
    own = visible.rpartition(",")[2]
    os.environ["CUDA_VISIBLE_DEVICES"] = own
    with multiprocessing.get_context("fork").Pool(1) as apart:
        problems = list(apart.apply(check_own, (0, device_type == "cuda")).problems)
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    index = visible.count(",")
    if visible_gpu(index) != own:
        problems.append(f"nvidia-smi would be asked for {visible_gpu(index)}, not {own}")
    if device_type == "cuda":
        device = torch.device("cuda", index)
        torch.ones(1, device=device)
        used = torch.cuda.get_device_properties(device).pci_bus_id
        pci = str(look_at_gpu(own).get("pci"))
        if f":{used:02x}:" not in pci.lower():
            problems.append(f"torch uses the GPU on bus {used:02x}, nvidia-smi tells of {pci}")
    return problems


if __name__ == "__main__":
    print(json.dumps(problems_as_a_rank(sys.argv[1], sys.argv[2])))
