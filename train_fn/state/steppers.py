"""Optimizers and schedulers as owners of plain attributes, such as a count of calls. Their
``state_dict`` may leave these out, so that a restart begins with the first values."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from train_fn.state.contents import few
from train_fn.state.optim import match_layout
from train_fn.state.optimizers import each_of
from train_fn.state.train_state import TrainState
from train_fn.step.plain_attributes import PlainAttributes

logger = logging.getLogger(__name__)


def steppers_of(state: TrainState) -> dict[str, Any]:
    """Return the run's optimizers and its scheduler, by the name to use for them."""
    optimizers = each_of(state.optimizer).items()
    found: dict[str, Any] = {f"optimizer {name}".strip(): each for name, each in optimizers}
    return found if state.scheduler is None else {**found, "scheduler": state.scheduler}


@contextmanager
def steppers_held(state: TrainState) -> Iterator[None]:
    """Keep what the state holds of optimizers and scheduler while their attributes are put back."""
    held = [
        (each, copy.deepcopy(each.state_dict()))
        for each in steppers_of(state).values()
        if _holds_attributes(each)
    ]
    yield
    for stepper, saved in held:
        stepper.load_state_dict(saved)
        if isinstance(stepper, torch.optim.Optimizer):
            match_layout(stepper)


def _holds_attributes(stepper: Any) -> bool:
    """Return whether its ``state_dict`` holds some. Torch's holds those of a scheduler, and none of
    an optimizer."""
    return type(stepper).state_dict is not torch.optim.Optimizer.state_dict


class StepperWatch:
    """Warn of attributes that the first step of an attempt changes and no checkpoint holds."""

    def __init__(self, state: TrainState) -> None:
        self._steppers = steppers_of(state)
        self._before: PlainAttributes | None = PlainAttributes(self._steppers)

    def look(self) -> None:
        """Look once, after the step."""
        before, self._before = self._before, None
        if before is None:
            return
        if lost := [name for name in before.changed() if not self._is_held(name)]:
            logger.warning(
                "a step changes %s, which no checkpoint holds: a restart begins with the first "
                "values. Let state_dict() and load_state_dict() of the optimizer or scheduler keep "
                "it, or put it into the optimizer's param_groups",
                few(lost),
            )

    def _is_held(self, name: str) -> bool:
        """Return whether an attribute, ``optimizer.calls``, is in its owner's ``state_dict``."""
        owner, _, attribute = name.partition(".")
        stepper: Any = self._steppers[owner]
        key = attribute.partition(".")[0]
        is_torchs = key.startswith("_") and isinstance(stepper, torch.optim.Optimizer)
        return is_torchs or (_holds_attributes(stepper) and key in stepper.state_dict())
