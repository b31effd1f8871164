"""Parameters without a shape, as of ``nn.LazyLinear``: they take it from the run's first
micro-batch, before the optimizer and the exchange between ranks are built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from train_fn.errors import BadTask
from train_fn.state.contents import few
from train_fn.step.plain_attributes import PlainAttributes
from train_fn.step.untrained import WarmUp, untrained_places
from train_fn.tasks.checks import where
from train_fn.tasks.options import loss_arguments
from train_fn.tasks.protocol import Task


def lazy_names(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that have no shape yet."""
    return [name for name, value in _tensors(model) if is_lazy(value)]


def shape_lazy_tensors(task: Task, model: nn.Module, batch: Any) -> None:
    """Give every lazy parameter and buffer its shape and first values by a pass over ``batch``, and
    put back what else the pass changes. What it draws is up to the caller's seed.

    Raises BadTask if some have no shape after it.
    """
    lazy = [module for module in model.modules() if any(map(is_lazy, _own_tensors(module)))]
    present = [value for value in model.parameters() if not is_lazy(value)]
    before = WarmUp(model, untrained_places(model, present), is_fresh=True)
    attributes = PlainAttributes(dict(model.named_modules()))
    with torch.no_grad():
        task.loss(model, batch, **dict.fromkeys(loss_arguments(task), 0))
    before.put_back()
    attributes.put_back()
    for module in lazy:
        if hasattr(module, "reset_running_stats"):  # of a LazyBatchNorm, which the pass has updated
            module.reset_running_stats()  # type: ignore[operator]
    if left := lazy_names(model):
        raise BadTask(
            f"{where(task, 'build_model')} returned parameters without a shape, and the first "
            f"micro-batch gives them none: {few(left)}. Call the model once in build_model, on an "
            "input that uses all of it"
        )


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    values = [*module._parameters.values(), *module._buffers.values()]
    return (value for value in values if value is not None)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
