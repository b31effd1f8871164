"""Arithmetic of forward and backward: fp32, bf16, or fp16 with a loss scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context that a forward pass runs in. Casts are not cached: ranks run different numbers of
    micro-batches."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


def build_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Scales losses for fp16, so that small gradients survive; does nothing for the others."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
