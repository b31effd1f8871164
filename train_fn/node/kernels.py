"""What decides the last bits of a computation on this node: nodes that are equal in all of it must
give equal bits, others need not."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

import torch

_CHOOSING = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that choose kernels."""


def kernels(device: torch.device) -> str:
    """Return a text that is equal on nodes whose kernels must give equal bits: versions, processor
    or GPU, threads, and what the environment chooses."""
    chosen = [f"{name}={os.environ[name]}" for name in _CHOOSING if name in os.environ]
    parts = [
        f"torch {torch.__version__}",
        _processor(),
        torch.backends.cpu.get_cpu_capability(),
        f"{torch.get_num_threads()} threads",
        *chosen,
    ]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    return ", ".join(parts)


@cache
def _processor() -> str:
    """Return the processor's model, as the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return " and ".join(sorted(models)) or platform.machine()
