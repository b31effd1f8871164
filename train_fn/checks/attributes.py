"""Plain attributes that code changes and no state holds: counters, averages and generators of
modules, tasks, optimizers and schedulers. A restart begins with their first values.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from train_fn.checks.check import Check, Moment, checked
from train_fn.state.contents import few
from train_fn.state.optim import each_of, match_layout
from train_fn.state.train_state import TrainState
from train_fn.step.plain_attributes import PlainAttributes
from train_fn.tasks.protocol import Task

_ONCE = "a copy of plain attributes, once an attempt"

logger = logging.getLogger(__name__)


def owners_of(task: Task, model: nn.Module) -> dict[str, object]:
    """Return the objects whose plain attributes a forward pass may change: the model's modules and
    the task."""
    return {**dict(model.named_modules()), type(task).__name__: task}


@checked(Moment.FIRST_PASS, cost="a copy of plain attributes")
def warn_of_unsaved(
    warn: Callable[[str], None], changed: list[str], attributes: PlainAttributes
) -> None:
    """Warn if the first pass changed attributes that are not part of the state.

    Args:
        changed: attributes after the pass. Those that the task's ``load_state_dict``, called since,
            has put back are part of its state.
    """
    still = set(attributes.changed())
    if lost := [name for name in changed if name in still]:
        warn(
            f"the first pass changes {few(lost)}, which no checkpoint holds: a restart "
            "begins with the first values. "
            "Register tensors as buffers of the model, take the count of steps from the parameter "
            "step of loss, draw from the global generators, and let state_dict() and "
            "load_state_dict() of the task keep the rest"
        )


class LostAttributes(Check):
    """Warn of attributes of modules and task that one of its methods changes, in the first call of
    an attempt."""

    costs = dict.fromkeys((Moment.LOSS, Moment.AFTER_STEP, Moment.EPOCH_HOOK), _ONCE)

    def __init__(self, owners: dict[str, object]) -> None:
        self._owners = owners
        self._before: dict[Moment, PlainAttributes | None] = {}

    def before(self, moment: Moment) -> None:
        if moment not in self._before:
            self._before[moment] = PlainAttributes(self._owners)

    def after(self, moment: Moment, source: str) -> None:
        before, self._before[moment] = self._before[moment], None
        if before is not None and (changed := before.changed()):
            logger.warning(
                "%s changes %s, which no checkpoint holds: a restart begins with the first values. "
                "Register tensors as buffers of the model, take counts of steps and epochs from "
                "the arguments, and let state_dict() and load_state_dict() of the task keep the "
                "rest",
                source,
                few(changed),
            )


# ---------------------------------------------------------------- optimizers and schedulers


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


class StepperAttributes(Check):
    """Warn of attributes of optimizers and scheduler that the first step of an attempt changes."""

    costs = dict.fromkeys((Moment.STEP,), _ONCE)

    def __init__(self, state: TrainState) -> None:
        self._steppers = steppers_of(state)
        self._before: PlainAttributes | None = PlainAttributes(self._steppers)

    def after(self, moment: Moment, source: str) -> None:
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


# ---------------------------------------------------------------- a user's loop

_SET_BY_ACCELERATE = ("_is_accelerate_prepared",)
"""Attributes that Accelerate sets on any model, also in the Trainer of Hugging Face."""


class LoopAttributes(Check):
    """Warn of attributes of a loop's models and optimizers that the first step of an attempt
    changes.

    Args:
        models: by the prefix of their names.
        optimizers: by name. What their ``state_dict`` has under the name of an attribute is kept.
    """

    costs = dict.fromkeys((Moment.STEP,), _ONCE)

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    ) -> None:
        owners: dict[str, object] = {
            f"{prefix}{name}".strip("."): module
            for prefix, model in models.items()
            for name, module in model.named_modules()
            if not _is_of_library(type(module))
        }
        owners |= {
            f"{prefix}{name}": weight
            for prefix, model in models.items()
            for name, weight in model.named_parameters()
        }
        self._of_libraries = {
            f"{name}.{key}".strip(".")
            for name, owner in owners.items()
            for key in (*_names_of_libraries(type(owner)), *_SET_BY_ACCELERATE)
        }
        for name, optimizer in (optimizers or {}).items():
            if not type(optimizer).__module__.startswith("torch."):
                owner = f"optimizer.{name}".strip(".")
                owners[owner] = optimizer
                self._of_libraries |= {f"{owner}.{key}" for key in optimizer.state_dict()}
        self._before: PlainAttributes | None = PlainAttributes(owners)

    def after(self, moment: Moment, source: str) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        changed = [name for name in before.changed() if not self._is_of_library(name)]
        if changed:
            logger.warning(
                "the first step changes %s, which no checkpoint holds unless an object in extra=… "
                "does: a restart begins with the first values. Register tensors as buffers of the "
                "model, take the count of steps from state.step_number, draw from the global "
                "generators, or pass an object with state_dict() and load_state_dict() that keeps "
                "the rest as es.protect(extra=…)",
                few(changed),
            )

    def _is_of_library(self, name: str) -> bool:
        return any(name == own or name.startswith(f"{own}.") for own in self._of_libraries)


def _names_of_libraries(kind: type) -> frozenset[str]:
    """Return the attributes that Lightning sets on a module of its own kind, as its trainer. They
    are Lightning's to keep."""
    return frozenset(
        name
        for base in kind.__mro__
        if base.__name__ == "LightningModule" and _is_of_library(base)
        for name in vars(base())
    )


def _is_of_library(kind: type) -> bool:
    """Return whether a class is of an installed package other than torch itself."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return "site-packages" in file and not kind.__module__.startswith("torch.")
