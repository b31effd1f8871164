"""Optimizers by name, and learning rates as pure functions of the step."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from everstep.spec.sections import (
    AdamSpec,
    AdamWSpec,
    ConstantScheduleSpec,
    OptimizerSpec,
    ScheduleSpec,
    SgdSpec,
    StepScheduleSpec,
)
from train_fn.errors import BadTask
from train_fn.step.fingerprints import local


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
    # torch's fused kernels take no complex parameters, and no sparse gradients
    is_odd = any(value.is_complex() for value in model.parameters()) or any(
        getattr(module, "sparse", False) for module in model.modules()
    )
    is_fused = not is_odd and not (skips_unused and isinstance(spec, SgdSpec))
    common: dict[str, Any] = {"lr": spec.lr, "fused": is_fused}
    match spec:
        case AdamWSpec():
            return torch.optim.AdamW(groups, betas=(spec.beta1, spec.beta2), eps=spec.eps, **common)
        case AdamSpec():
            return torch.optim.Adam(groups, betas=(spec.beta1, spec.beta2), eps=spec.eps, **common)
        case SgdSpec():
            return torch.optim.SGD(groups, momentum=spec.momentum, nesterov=spec.nesterov, **common)


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


def with_strides(
    state: dict[str, Any], optimizer: torch.optim.Optimizer | Optimizers
) -> dict[str, Any]:
    """Return the optimizer's ``state_dict`` with the strides of tensors that ``match_layout`` could
    not know. Files and messages hold no strides, and sums over other strides have other bits.

    Returns:
        ``state``, with an entry ``strides`` (place of the tensor -> its strides) if there are such
        tensors. Raise BadTask if one of them cannot be given its strides again.
    """
    strides = {}
    for place, parameter, holder, _, value in _tensors_in(optimizer):
        if value.stride() == _usual(value, parameter):
            continue
        if torch.empty_like(value, device="meta").stride() == value.stride():  # it has no gaps
            if isinstance(holder, tuple):
                raise BadTask(
                    f"the optimizer keeps the tensor {place} with strides {value.stride()} in a "
                    "tuple, which cannot be restored. Keep it in a list, or make it contiguous"
                )
            strides[place] = list(value.stride())
    return {**state, "strides": strides} if strides else state


def match_layout(
    optimizer: torch.optim.Optimizer | Optimizers,
    strides: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Give optimizer tensors the strides that they had when they were saved, by default those of
    their parameters: fused kernels read both as plain memory.

    Args:
        strides: as ``with_strides`` returned them.
    """
    for place, parameter, holder, key, value in _tensors_in(optimizer):
        wanted = tuple((strides or {}).get(place, _usual(value, parameter)))
        if value.stride() != wanted and not isinstance(holder, tuple):
            holder[key] = value.new_empty_strided(value.shape, wanted).copy_(value)


def _usual(value: torch.Tensor, parameter: torch.Tensor | None) -> tuple[int, ...]:
    """Return the strides of a tensor of a parameter's state that need no entry."""
    if parameter is not None and value.shape == parameter.shape:
        return parameter.stride()
    return value.stride() if value.is_contiguous() else value.new_empty(value.shape).stride()


def _tensors_in(
    optimizer: torch.optim.Optimizer | Optimizers,
) -> Iterator[tuple[str, torch.Tensor | None, Any, Any, torch.Tensor]]:
    """Yield each tensor of the state: its place as text, the parameter to which it belongs, what
    holds it under which key, and the tensor. An optimizer may hold some that belong to none."""
    first = 0
    for name, each in each_of(optimizer).items():
        parameters = [parameter for group in each.param_groups for parameter in group["params"]]
        numbers = {id(parameter): first + at for at, parameter in enumerate(parameters)}
        first += len(parameters)
        for owner in each.state:
            number = numbers.get(id(owner))
            place = f"{name}/{owner}" if number is None else str(number)
            for path, holder, key, value in _held(each.state, owner, place):
                yield path, owner if number is not None else None, holder, key, value


def _held(holder: Any, key: Any, path: str) -> Iterator[tuple[str, Any, Any, torch.Tensor]]:
    value = holder[key]
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield path, holder, key, value
    elif isinstance(value, dict | list | tuple):
        for inner in value if isinstance(value, dict) else range(len(value)):
            yield from _held(value, inner, f"{path}/{inner}")


# ---------------------------------------------------------------- optimizers

# Several optimizers in the form of one.

_NAME = "everstep_optimizer"
"""In a saved group: the name of its optimizer."""


class Optimizers:
    """Look like one optimizer whose groups are those of all, in order. So checkpoints, learning
    rates and checks need not know how many there are.

    Its ``state_dict`` has the form of torch's. Parameters are numbered over all optimizers.
    """

    def __init__(self, by_name: Mapping[str, torch.optim.Optimizer]) -> None:
        self.by_name = dict(by_name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the live groups of all optimizers."""
        return [group for each in self.by_name.values() for group in each.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters."""
        for optimizer in self.by_name.values():
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers as that of one. Tensors are live."""
        state: dict[int | str, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for name, optimizer in self.by_name.items():
            own = optimizer.state_dict()
            for key, values in own["state"].items():
                state[first + key if isinstance(key, int) else f"{name}/{key}"] = values
            for group in own["param_groups"]:
                numbers = [first + number for number in group["params"]]
                groups.append({**group, "params": numbers, _NAME: name})
            first += sum(len(group["params"]) for group in own["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned. Raises BadTask if it is of other optimizers."""
        saved = [group.get(_NAME) for group in state["param_groups"]]
        own = [name for name, each in self.by_name.items() for _ in each.param_groups]
        if saved != own:
            raise BadTask(
                f"build_optimizer returned the optimizers {sorted(self.by_name)}, with "
                f"{len(own)} parameter groups in all, but the state holds those of "
                f"{sorted({str(name) for name in saved})}, with {len(saved)} groups. Return the "
                "same, in the same order, or start a new run"
            )
        groups, first = iter(state["param_groups"]), 0
        for name, optimizer in self.by_name.items():
            its = [dict(each) for each in itertools.islice(groups, len(optimizer.param_groups))]
            size = sum(len(group["params"]) for group in its)
            for group in its:
                del group[_NAME]
                group["params"] = [number - first for number in group["params"]]
            values = {}
            for key, each in state["state"].items():
                if isinstance(key, str):
                    if key.startswith(f"{name}/"):
                        values[key.removeprefix(f"{name}/")] = each
                elif first <= key < first + size:
                    values[key - first] = each
            optimizer.load_state_dict({"state": values, "param_groups": its})
            first += size


def each_of(optimizer: torch.optim.Optimizer | Optimizers) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers by name; the name of a single one is empty."""
    return optimizer.by_name if isinstance(optimizer, Optimizers) else {"": optimizer}


# ---------------------------------------------------------------- ema

# Exponential moving average of a model's weights.


class Ema:
    """Keep an exponential moving average of the parameters; of sharded ones, of this rank's rows.
    Buffers are not averaged: both sets of weights use the model's own."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = dict(model.named_parameters())
        self._averages = {
            name: local(parameter).detach().clone() for name, parameter in self._parameters.items()
        }
        first = {parameter: name for name, parameter in self._parameters.items()}
        self._names = {
            name: first[parameter]
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages after a step; ``step`` counts steps done. The decay starts near 0.1
        and grows, so that the initial weights lose their influence."""
        decay = min(self.decay, (1 + step) / (10 + step))
        weights = [local(parameter) for parameter in self._parameters.values()]
        torch._foreach_lerp_(list(self._averages.values()), weights, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the averages as the model's weights inside the block. Restore its own weights
        afterwards, even on an error."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return each average under every name of its parameter. Tied weights have several names,
        as in the model's own ``state_dict``."""
        return {name: self._averages[first] for name, first in self._names.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load the average of every parameter from ``state``. Ignore other entries."""
        for name, average in self._averages.items():
            average.copy_(state[name])

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap the storages of weights and averages. Nothing is copied, and DDP and the optimizer
        keep referring to the same parameter objects. FSDP2 keeps the storage of its rows, so that
        their values are swapped."""
        for name, parameter in self._parameters.items():
            average, rows = self._averages[name], local(parameter)
            if rows is parameter:
                parameter.data, self._averages[name] = average, parameter.data
            else:
                kept = rows.clone()
                rows.copy_(average)
                average.copy_(kept)


def unpacked(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's ``state_dict`` with separate tensors. In states of version 0.1 there is
    one for each name, with the values of all parameters in sequence, if they are small."""
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
