"""Arithmetic of forward and backward: fp32, bf16, or fp16 with a loss scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the autocast context for one forward pass. Its cache of casts is cleared on exit, so
    none is kept between micro-batches."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[precision])


def build_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Return a loss scaler for fp16, which keeps small gradients from underflowing. It is disabled
    for other precisions."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
