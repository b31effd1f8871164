"""The task's own state: the result of its ``state_dict`` after each step, saved with the training
state."""

from __future__ import annotations

import copy
import logging
from typing import Any

from torch import nn

from train_fn.errors import BadTask
from train_fn.state.tensor_tree import copy_to_cpu
from train_fn.tasks.checks import where
from train_fn.tasks.protocol import Task

logger = logging.getLogger(__name__)


class TaskState:
    """Call a task's optional methods ``state_dict()`` and ``load_state_dict(state)``. Do nothing if
    the task has neither.

    Raise BadTask for a task that has only one of the two.
    """

    def __init__(self, task: Task) -> None:
        names = ("state_dict", "load_state_dict")
        own = [
            name
            for name in names
            if callable(getattr(task, name, None)) and not _is_torchs(task, name)
        ]
        if len(own) == 1:
            lacking = names[own == [names[0]]]
            raise BadTask(
                f"{where(task, own[0])} needs {lacking} beside it: a restart goes on from what the "
                "two of them keep"
            )
        self._task: Any = task if own else None

    def __bool__(self) -> bool:
        return self._task is not None

    def capture(self) -> Any:
        """Return a copy of the task's current state; None if it has no such methods. Raise BadTask
        for a value that cannot be saved."""
        return (
            copy_to_cpu({"task": self._task.state_dict()})["task"]
            if self._task is not None
            else None
        )

    def load(self, state: Any) -> None:
        """Load a captured state into the task."""
        if self._task is None:
            if state is not None:
                logger.warning(
                    "the state to resume holds a state of the task, but the task has no "
                    "load_state_dict any more, so that state is dropped"
                )
        elif state is not None:
            self._task.load_state_dict(copy.deepcopy(state))


def _is_torchs(task: Task, name: str) -> bool:
    """Return whether this is nn.Module's own method, whose state is the model's."""
    return isinstance(task, nn.Module) and getattr(type(task), name) is getattr(nn.Module, name)
