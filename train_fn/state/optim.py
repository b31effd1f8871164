"""Optimizers by name, and learning rates as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from everstep.spec.optimization import (
    AdamSpec,
    AdamWSpec,
    ConstantScheduleSpec,
    OptimizerSpec,
    ScheduleSpec,
    SgdSpec,
    StepScheduleSpec,
)
from train_fn.errors import BadTask
from train_fn.state.optimizers import Optimizers


def build_optimizer(
    spec: OptimizerSpec, model: nn.Module, *, skips_unused: bool = False
) -> torch.optim.Optimizer:
    """Return the optimizer that ``spec`` names. Parameters with fewer than two dimensions (biases,
    normalisation scales) have no weight decay by default.

    Use fused kernels on every device where they take all parameters: one call updates all of them.
    On a CPU, small models would otherwise spend their time in Python. Raise BadTask if a pattern of
    ``spec.groups`` is the first match of no parameter.

    Args:
        skips_unused: whether a parameter may get its first gradient later than others. Torch's
            fused SGD with momentum cannot do that.
    """
    groups = parameter_groups(spec, model)
    is_fused = _may_be_fused(model) and not (skips_unused and isinstance(spec, SgdSpec))
    common: dict[str, Any] = {"lr": spec.lr, "fused": is_fused}
    match spec:
        case AdamWSpec():
            return torch.optim.AdamW(groups, betas=(spec.beta1, spec.beta2), eps=spec.eps, **common)
        case AdamSpec():
            return torch.optim.Adam(groups, betas=(spec.beta1, spec.beta2), eps=spec.eps, **common)
        case SgdSpec():
            return torch.optim.SGD(groups, momentum=spec.momentum, nesterov=spec.nesterov, **common)


def _may_be_fused(model: nn.Module) -> bool:
    """Whether torch's fused kernels take all parameters: none complex, none with sparse
    gradients."""
    return not any(value.is_complex() for value in model.parameters()) and not any(
        getattr(module, "sparse", False) for module in model.modules()
    )


def parameter_groups(spec: OptimizerSpec, model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups by learning rate and weight decay: first the parameters that match no
    pattern, then those of each entry of ``spec.groups`` in order.

    The order is part of the optimizer's state.
    """
    own = dict(enumerate(spec.groups))
    members: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            number = next(
                (number for number, group in own.items() if fnmatchcase(name, group.parameters)), -1
            )
            members.setdefault((number, parameter.ndim < 2), []).append(parameter)
    for number, group in own.items():
        if not any(number == found for found, _ in members):
            names = ", ".join(name for name, _ in model.named_parameters())
            raise BadTask(
                f"optimizer.groups.{number}.parameters {group.parameters!r} is the first match of "
                "no parameter; "
                f"the model's are {names:.2000}"
            )
    groups = []
    for (number, small), parameters in sorted(members.items(), key=lambda item: item[0]):
        own_decay, scale = (
            (own[number].weight_decay, own[number].lr_scale) if number in own else (None, 1.0)
        )
        decay = own_decay if own_decay is not None else 0.0 if small else spec.weight_decay
        groups.append({"params": parameters, "weight_decay": decay, "lr": spec.lr * scale})
    return groups


def lr_factor(spec: ScheduleSpec, step: int, total_steps: int, steps_per_epoch: int) -> float:
    """Return the learning rate of the step after ``step`` steps done, as a fraction of the peak.

    The warm-up reaches the peak at step ``warmup_steps``. Cosine and linear schedules reach
    ``final_fraction`` at the last step.
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


def drop_gradients(
    optimizer: torch.optim.Optimizer | Optimizers, others: Sequence[nn.Parameter] = ()
) -> None:
    """Set all gradients to None, like ``optimizer.zero_grad(set_to_none=True)``.

    An optimizer that defines its own ``zero_grad`` has it called. Torch's takes several times as
    long, since it also handles the profiler and zero filling.

    Args:
        others: parameters that the optimizer does not hold. Their gradients would otherwise
            accumulate from step to step.
    """
    for parameter in others:
        parameter.grad = None
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def match_layout(optimizer: torch.optim.Optimizer) -> None:
    """Give optimizer tensors the memory layout of their parameters, since fused kernels read both
    as plain memory."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if (
                isinstance(value, torch.Tensor)
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
