"""The optimizer and the scheduler of a replica: the task's own, or those of the spec."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from everstep.spec.optimization import ConstantScheduleSpec
from everstep.spec.run_spec import RunSpec
from train_fn.errors import BadTask
from train_fn.state.optim import build_optimizer
from train_fn.state.trained_parameters import check_no_scheduler
from train_fn.tasks.checks import checked_optimizer, checked_scheduler, where
from train_fn.tasks.protocol import Task


def built_optimizer(spec: RunSpec, task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that the task builds, else that of the spec. Raises BadTask."""
    build_own = getattr(task, "build_optimizer", None)
    if build_own is None:
        skips_unused = spec.train.unused_parameters == "allow"
        return build_optimizer(spec.optimizer, model, skips_unused=skips_unused)
    optimizer = checked_optimizer(task, model, build_own(model))
    check_no_scheduler(optimizer, where(task, "build_optimizer"))
    return optimizer


def optimizer_source(task: Task) -> str:
    """Return who builds the optimizer, for errors."""
    if hasattr(task, "build_optimizer"):
        return where(task, "build_optimizer")
    return "the spec's optimizer"


def built_scheduler(
    spec: RunSpec, task: Task, optimizer: torch.optim.Optimizer, total_steps: int
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
    return checked_scheduler(task, optimizer, build_own(optimizer, total_steps))
