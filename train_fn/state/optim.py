"""Optimizers by name, their states as few tensors, and learning rates as pure functions of the
step."""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from everstep.spec.catalog import (
    AdamSpec,
    AdamWSpec,
    ConstantScheduleSpec,
    OptimizerSpec,
    ScheduleSpec,
    SgdSpec,
    StepScheduleSpec,
)
from train_fn.errors import BadTask

_kind = operator.attrgetter("dtype", "device", "layout", "requires_grad")
_form = operator.attrgetter("shape", "dtype")
_nbytes = operator.attrgetter("nbytes")

FLAT_BYTES = 64 << 20
"""Larger states are left as they are: one more copy of them would cost more than their many tensors
do."""


def build_optimizer(spec: OptimizerSpec, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that ``spec`` names. Parameters with fewer than two dimensions (biases,
    normalisation scales) are not decayed.

    Fused kernels on every device: one call for all parameters, which on a CPU is what keeps small
    models from being bound by Python. Raises BadTask where a pattern of ``spec.groups`` is the
    first match of no parameter.
    """
    groups = parameter_groups(spec, model)
    common: dict[str, Any] = {"lr": spec.lr, "fused": True}
    match spec:
        case AdamWSpec():
            return torch.optim.AdamW(groups, betas=(spec.beta1, spec.beta2), eps=spec.eps, **common)
        case AdamSpec():
            return torch.optim.Adam(groups, betas=(spec.beta1, spec.beta2), eps=spec.eps, **common)
        case SgdSpec():
            return torch.optim.SGD(groups, momentum=spec.momentum, nesterov=spec.nesterov, **common)


def parameter_groups(spec: OptimizerSpec, model: nn.Module) -> list[dict[str, Any]]:
    """Parameters by learning rate and decay: first those that no pattern names, then as
    ``spec.groups`` has them.

    Their order is part of the optimizer's state.
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
    """Learning rate of the step that follows ``step`` steps done, as a share of the peak.

    The warm-up ends on the peak at step ``warmup_steps``; cosine and linear end on
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


def drop_gradients(optimizer: torch.optim.Optimizer, others: Sequence[nn.Parameter] = ()) -> None:
    """As ``optimizer.zero_grad(set_to_none=True)``, which an optimizer may define for itself.

    Torch's own takes several times as long between a model's passes: it is made for its profiler
    and for zeros, too.

    Args:
        others: parameters that the optimizer does not hold, and whose gradients would add up from
            step to step.
    """
    for parameter in others:
        parameter.grad = None
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


class Packer:
    """Gathers one optimizer's values for all parameters in one flat tensor of each kind, where they
    are alike and small.

    To describe a tensor is Python, as much of it as to write 50 kB: of a small model's moments that
    is most of a checkpoint. How they lie is found out once, and holds as long as they are the same
    objects.
    """

    def __init__(self) -> None:
        self._flat: _Flat | None = None

    def packed(self, state: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's ``state_dict``, its values as they are now.

        Returns:
            In place of ``state`` the entry ``flat``: ``parameters``, their numbers; ``values``, by
                name one tensor with the values
            of all parameters one behind the other, which the next call overwrites; ``shapes``, by
            name those of each, as JSON. Others come back as they are.
        """
        columns = _columns(state["state"])
        if self._flat is None or not self._flat.is_of(columns):
            self._flat = _Flat(columns) if _are_alike(columns) else None
        if self._flat is None:
            return state
        flat = {
            "parameters": list(state["state"]),
            "values": self._flat.filled(),
            "shapes": dict(self._flat.shapes),
        }
        return {**{name: value for name, value in state.items() if name != "state"}, "flat": flat}


class _Flat:
    """Flat tensors, and where in them the values of each parameter lie."""

    def __init__(self, columns: dict[str, list[torch.Tensor]]) -> None:
        self._names = list(columns)
        self._sources = list(itertools.chain(*columns.values()))
        self._forms = list(map(_form, self._sources))
        self._values = {
            name: column[0].new_empty(sum(map(torch.numel, column)))
            for name, column in columns.items()
        }
        parts = [
            torch.split(self._values[name], [value.numel() for value in column])
            for name, column in columns.items()
        ]
        self._targets = [
            part.view(value.shape)
            for part, value in zip(itertools.chain(*parts), self._sources, strict=True)
        ]
        self.shapes = {
            name: json.dumps([value.shape for value in column]) for name, column in columns.items()
        }

    def is_of(self, columns: dict[str, list[Any]]) -> bool:
        """Whether these are the values that it was made for, and of the same shapes and kinds."""
        values = list(itertools.chain(*columns.values()))
        return (
            list(columns) == self._names
            and len(values) == len(self._sources)
            and all(map(operator.is_, values, self._sources))
            and list(map(_form, values)) == self._forms
        )

    @torch.no_grad()
    def filled(self) -> dict[str, torch.Tensor]:
        torch._foreach_copy_(self._targets, self._sources)
        return dict(self._values)


def unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """What ``Packer.packed`` was given, with tensors of their own."""
    if "flat" not in state:
        return state
    flat = state["flat"]
    values: dict[Any, dict[str, torch.Tensor]] = {number: {} for number in flat["parameters"]}
    for name, text in flat["shapes"].items():
        shapes = json.loads(text)
        parts = torch.split(flat["values"][name], [math.prod(shape) for shape in shapes])
        for number, part, shape in zip(values, parts, shapes, strict=True):
            values[number][name] = part.view(shape).clone()
    return {**{name: value for name, value in state.items() if name != "flat"}, "state": values}


def _columns(values: dict[Any, dict[str, Any]]) -> dict[str, list[Any]]:
    """By name the values of all parameters; none where parameters have other names."""
    rows = list(values.values())
    names = list(rows[0]) if rows else []
    if any(list(row) != names for row in rows):
        return {}
    return {name: [row[name] for row in rows] for name in names}


def _are_alike(columns: dict[str, list[Any]]) -> bool:
    """Whether values can lie in a flat tensor of each name, and are small."""
    alike = bool(columns) and all(map(_is_alike, columns.values()))
    return alike and sum(sum(map(_nbytes, column)) for column in columns.values()) <= FLAT_BYTES


def _is_alike(column: list[Any]) -> bool:
    """Whether these are plain tensors of numbers that one flat tensor can hold."""
    if set(map(type, column)) != {torch.Tensor}:
        return False
    [(dtype, _, layout, requires_grad), *others] = set(map(_kind, column))
    return not others and dtype.is_floating_point and layout is torch.strided and not requires_grad
