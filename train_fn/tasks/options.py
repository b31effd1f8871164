"""Options of a task beside its methods: whether ``loss`` takes the step's number, and whether there
is a loss in validation."""

from __future__ import annotations

import inspect
from typing import Any

from everstep.wire.metric_names import PREFIX
from train_fn.errors import BadTask
from train_fn.tasks.checks import where
from train_fn.tasks.protocol import Task

STEP_ARGUMENTS = ("step", "epoch")
"""Parameters that ``loss`` may have. It gets them by name; both count from 0."""
NO_LOSS = (
    "If the model has no loss in eval mode, measure it in metrics alone: set validation_loss = "
    "False on the task"
)


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


def measures_loss(task: Task) -> bool:
    """Return whether evaluation measures a loss: unless the task has none, or sets
    ``validation_loss = False`` because its model has none in eval mode.

    Raises BadTask for another value, and if nothing else is measured.
    """
    asked: Any = getattr(task, "validation_loss", True)
    name = type(task).__name__
    if not isinstance(asked, bool):
        raise BadTask(f"validation_loss of {name} is {asked!r:.100}; set it to True or False")
    measures: bool = asked and has_loss(task)
    if not measures and not callable(getattr(task, "metrics", None)):
        raise BadTask(
            f"{name} {'has no loss' if asked else 'sets validation_loss to False'} and has no "
            "method metrics, so that nothing is measured. Add metrics(model, batch), or let "
            "build_datasets return no val"
        )
    return measures


def require_measured(task: Task, best_metric: str) -> None:
    """Raise BadTask if ``best_metric`` is the loss of an evaluation that measures none."""
    wanted = best_metric.removeprefix("ema_").removeprefix(PREFIX)
    if wanted == "loss" and not measures_loss(task):
        raise BadTask(
            f"checkpoint.best_metric is {best_metric!r}, but {type(task).__name__} sets "
            "validation_loss to False: set best_metric to a name that "
            f"{where(task, 'metrics')} returns, or to null"
        )
