"""Kernels that give the same bits each time, where a run wants them.

What they need in the environment is set when a rank is launched (``recovery/environment.py``).
"""

from __future__ import annotations

from typing import Literal

import torch

BITWISE = "bitwise"
"""The same number of ranks on the same hardware gives the same bits, also over restarts."""
BITWISE_WHERE_POSSIBLE = "bitwise where kernels are"
"""The same, but for operators that have no deterministic kernel; torch warns of each."""
FLOAT_TOLERANCE = "float tolerance"
"""Results of two runs, and of a run before and after a restart, agree to float tolerance."""


def set_determinism(wanted: bool | Literal["auto"], device: torch.device) -> None:
    """Choose deterministic kernels where asked for. ``auto`` is on for CPUs, and lets pass what has
    no deterministic kernel."""
    deterministic = device.type == "cpu" if wanted == "auto" else wanted
    torch.use_deterministic_algorithms(deterministic, warn_only=wanted == "auto")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a debugging aid that writes every new tensor once more
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = not deterministic


def reproducibility() -> str:
    """Return what holds for this process, in words for people."""
    if not torch.are_deterministic_algorithms_enabled():
        return FLOAT_TOLERANCE
    if torch.is_deterministic_algorithms_warn_only_enabled():
        return BITWISE_WHERE_POSSIBLE
    return BITWISE
