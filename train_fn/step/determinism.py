"""Choose deterministic kernels if a run asks for them.

The environment variables that they need are set when a rank is launched
(``recovery/environment.py``).
"""

from __future__ import annotations

from typing import Literal

import torch

BITWISE = "bitwise"
"""The same world size on the same hardware gives the same bits, even across restarts."""
ELASTIC = "bitwise at every world size"
"""As ``BITWISE``, whatever the number of ranks and its changes."""
BITWISE_WHERE_POSSIBLE = "bitwise where kernels are"
"""As ``BITWISE``, except for operators without a deterministic kernel. Torch warns of each."""
FLOAT_TOLERANCE = "float tolerance"
"""Results of two runs, and of a run before and after a restart, agree to float tolerance."""


def set_determinism(wanted: bool | Literal["auto"], device: torch.device) -> None:
    """Choose deterministic kernels if asked for. ``auto`` turns them on for CPUs, and only warns of
    operators without one."""
    deterministic = device.type == "cpu" if wanted == "auto" else wanted
    torch.use_deterministic_algorithms(deterministic, warn_only=wanted == "auto")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a debugging aid that writes every new tensor once more
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = not deterministic


def reproducibility(
    exactness: Literal["world_size", "elastic"] = "world_size", *, compiled: bool = False
) -> str:
    """Return a text for users on how reproducible results of this process are.

    A compiled model promises no bits: the shapes that a process has seen before decide which
    kernels torch generates, and a restart sees them in another order.
    """
    if exactness == "elastic":
        return ELASTIC
    if compiled:
        return FLOAT_TOLERANCE
    if not torch.are_deterministic_algorithms_enabled():
        return FLOAT_TOLERANCE
    if torch.is_deterministic_algorithms_warn_only_enabled():
        return BITWISE_WHERE_POSSIBLE
    return BITWISE
