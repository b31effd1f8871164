"""The optimizer and the scheduler of a replica: the task's own, or those of the spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from everstep.spec.optimization import ConstantScheduleSpec
from everstep.spec.run_spec import RunSpec
from train_fn.errors import BadTask
from train_fn.state.optim import build_optimizer
from train_fn.state.optimizers import Optimizers
from train_fn.state.trained_parameters import check_no_scheduler
from train_fn.tasks.checks import checked_optimizer, checked_scheduler, where
from train_fn.tasks.own_step import makes_own_steps
from train_fn.tasks.protocol import Task


def built_optimizer(
    spec: RunSpec, task: Task, model: nn.Module
) -> torch.optim.Optimizer | Optimizers:
    """Return the optimizer that the task builds, else that of the spec; several in the form of one.
    Raises BadTask."""
    build_own = getattr(task, "build_optimizer", None)
    if build_own is None:
        skips_unused = spec.train.unused_parameters == "allow"
        return build_optimizer(spec.optimizer, model, skips_unused=skips_unused)
    built, source = build_own(model), where(task, "build_optimizer")
    if isinstance(built, Mapping | list | tuple):
        optimizer: torch.optim.Optimizer | Optimizers = _several(task, model, built)
    else:
        optimizer = checked_optimizer(task, model, built)
    check_no_scheduler(optimizer, source)
    return optimizer


def optimizer_source(task: Task) -> str:
    """Return who builds the optimizer, for errors."""
    if hasattr(task, "build_optimizer"):
        return where(task, "build_optimizer")
    return "the spec's optimizer"


def _several(task: Task, model: nn.Module, built: Any) -> Optimizers:
    source = where(task, "build_optimizer")
    if not makes_own_steps(task):
        raise BadTask(
            f"{source} returned several optimizers, but one loss has one step. Give the task the "
            "method training_step(model, batch, step, optimizers), or return one optimizer with "
            "several parameter groups"
        )
    if not isinstance(built, Mapping) or not all(
        isinstance(name, str) and name.isidentifier() for name in built
    ):
        raise BadTask(
            f"{source} must return several optimizers as a dict of names, not "
            f"{list(built)!r:.200}: checkpoints hold their states by name"
        )
    if not built:
        raise BadTask(f"{source} returned an empty dict; return at least one optimizer")
    return Optimizers(
        {name: checked_optimizer(task, model, each, name) for name, each in built.items()}
    )


def built_scheduler(
    spec: RunSpec, task: Task, optimizer: torch.optim.Optimizer | Optimizers, total_steps: int
) -> Any | None:
    """Return the scheduler that the task builds; None if it leaves that to the spec's schedule.
    Raises BadTask, also if the spec sets a schedule as well."""
    build_own = getattr(task, "build_scheduler", None)
    if build_own is None:
        return None
    if spec.schedule != ConstantScheduleSpec():
        raise BadTask(
            f"the spec sets schedule ({spec.schedule.name}), and {where(task, 'build_scheduler')} "
            "builds a scheduler: only one of them can set the learning rates. Remove schedule "
            "from the spec, or build_scheduler from the task"
        )
    if isinstance(optimizer, Optimizers):
        raise BadTask(
            f"{where(task, 'build_scheduler')} builds one scheduler, and build_optimizer several "
            "optimizers. Use schedule: in the spec, which scales the rates of all"
        )
    return checked_scheduler(task, optimizer, build_own(optimizer, total_steps))
