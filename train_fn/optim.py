"""Optimizers by name, and learning rates as pure functions of the step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from everstep.catalog import (
    AdamSpec,
    AdamWSpec,
    ConstantScheduleSpec,
    OptimizerSpec,
    ScheduleSpec,
    SgdSpec,
    StepScheduleSpec,
)


def build_optimizer(spec: OptimizerSpec, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that ``spec`` names. Parameters with fewer than two dimensions (biases, normalisation scales) are not decayed.

    Fused kernels on every device: one call for all parameters, which on a CPU is what keeps small models from being bound by
    Python.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    common: dict[str, Any] = {"lr": spec.lr, "fused": True}
    match spec:
        case AdamWSpec():
            return torch.optim.AdamW(groups, betas=(spec.beta1, spec.beta2), eps=spec.eps, **common)
        case AdamSpec():
            return torch.optim.Adam(groups, betas=(spec.beta1, spec.beta2), eps=spec.eps, **common)
        case SgdSpec():
            return torch.optim.SGD(groups, momentum=spec.momentum, nesterov=spec.nesterov, **common)


def lr_factor(spec: ScheduleSpec, step: int, total_steps: int, steps_per_epoch: int) -> float:
    """Learning rate of the step that follows ``step`` steps done, as a share of the peak.

    The warm-up ends on the peak at step ``warmup_steps``; cosine and linear end on ``final_fraction`` at the last step.
    """
    if step < spec.warmup_steps:
        return (step + 1) / spec.warmup_steps
    if isinstance(spec, ConstantScheduleSpec):
        return 1.0
    if isinstance(spec, StepScheduleSpec):
        return float(spec.gamma ** (step // (spec.every_epochs * steps_per_epoch)))
    progress = min(1.0, (step + 1 - spec.warmup_steps) / max(1, total_steps - spec.warmup_steps))
    share = 0.5 * (1 + math.cos(math.pi * progress)) if spec.name == "cosine" else 1 - progress
    return spec.final_fraction + (1 - spec.final_fraction) * share


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Scale every parameter group's own peak learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
