"""What a task is: a plain class that says what is trained on what. Everstep calls it on every
rank.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import IterableDataset

from train_fn.user_code.modules import place_of

Sum = torch.Tensor | float | int
"""A sum over a micro-batch; a tensor has no dimensions."""


class Task(Protocol):
    """The part that every task has, but for ``loss``, which one with ``training_step`` may leave
    out. Optional methods: ``metrics``, ``build_metrics``, ``training_step``, ``build_optimizer``,
    ``build_scheduler``, ``shard_modules``, ``after_step``, ``collate``, ``on_epoch_end``,
    ``state_dict`` and ``load_state_dict``. Optional attributes: ``validation_loss``,
    ``flops_per_sample``, ``peak_flops_per_s`` and ``tokens_per_sample``."""

    def build_model(self) -> nn.Module:
        """The model on CPU; its weights may be drawn from torch's global generator, which is
        seeded."""

    def build_datasets(self) -> dict[str, Any]:
        """``{"train": dataset, "val": dataset or None}``, map-style or iterable; a ``fingerprint``
        attribute guards resumes."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Sum]:
        """(loss summed over the micro-batch, weight: how many samples or tokens it is a sum
        over). It gets ``step`` and ``epoch`` by name if it has such parameters."""


# ---------------------------------------------------------------- what a task has

STEP_ARGUMENTS = ("step", "epoch")
"""Parameters that ``loss`` may have. It gets them by name; both count from 0."""
METHOD = "training_step"
"""Of a task that steps its optimizers itself."""
LOSS = "loss"
MOST_VALUES = 16
"""Metrics of a step beside its loss."""


def where(task: Task, method: str) -> str:
    """Return a task's method in words, with its file and line: ``MyTask.loss (my_pkg/task.py, line
    12)``."""
    return f"{type(task).__name__}.{method}{place_of(getattr(task, method, None))}"


def has_loss(task: Task) -> bool:
    """Return whether the task has a loss. One with ``training_step`` may have none."""
    return callable(getattr(task, "loss", None))


def loss_arguments(task: Task) -> tuple[str, ...]:
    """Return those of STEP_ARGUMENTS that ``loss`` takes beside model and batch."""
    if not has_loss(task):
        return ()
    try:
        parameters = list(inspect.signature(task.loss).parameters.values())
    except (TypeError, ValueError):  # made by C code, which does not say what it takes
        return ()
    named = {each.name for each in parameters[2:] if each.kind is not each.POSITIONAL_ONLY}
    return tuple(name for name in STEP_ARGUMENTS if name in named)


def is_iterable(dataset: Any) -> bool:
    """Return whether a data set is read from one end to the other, and not by index."""
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def makes_own_steps(task: Task) -> bool:
    """Return whether the task steps its optimizers itself."""
    return callable(getattr(task, METHOD, None))


def step_method(task: Task) -> str:
    """Return the method that trains, with its file and line, for errors."""
    return where(task, METHOD if makes_own_steps(task) else "loss")
