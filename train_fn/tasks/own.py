"""The task of a user: load it, build it, and step its optimizers where it does so itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from everstep.spec.code import CodeSpec
from everstep.spec.run_spec import RunSpec
from everstep.spec.tasks import LanguageModelingSpec
from train_fn.errors import BadTask
from train_fn.recovery.error_text import ended_program
from train_fn.tasks.builtin import ImageClassification, LanguageModeling
from train_fn.tasks.checks import is_iterable, where
from train_fn.tasks.protocol import Task
from train_fn.user_code.modules import load_named, place_of

REQUIRED_METHODS = ("build_model", "build_datasets", "loss")
"""Of a task without ``training_step``, which may have no ``loss``."""


def build_own_task(code: CodeSpec) -> Task:
    """Import and build the task. Raises BadTask with file and line if it is no task. Lets errors of
    its own code through."""
    assert code.task is not None
    make = load_named(code.task)
    if not callable(make):
        raise BadTask(
            f"{code.task} is a {type(make).__name__}, not a class; code.task names a class with "
            f"{', '.join(REQUIRED_METHODS)}"
        )
    try:
        inspect.signature(make).bind(**code.args)
    except TypeError as exc:
        raise BadTask(
            f"{code.task}{place_of(make)} cannot be made with code.args {code.args!r:.200}: {exc}"
        ) from exc
    except ValueError:
        pass  # made by C code, which does not say what it takes
    try:
        task: Task = make(**code.args)
    except SystemExit as exc:
        raise ended_program(f"{code.task} cannot be made", exc) from exc
    needed = REQUIRED_METHODS[:2] if makes_own_steps(task) else REQUIRED_METHODS
    missing = [name for name in needed if not callable(getattr(task, name, None))]
    if missing:
        raise BadTask(
            f"{code.task}{place_of(make)} has no method {', '.join(missing)}; a task needs "
            f"{', '.join(needed)}"
        )
    return task


# ---------------------------------------------------------------- own step

# What a task with ``training_step`` may be, and what it returns.

METHOD = "training_step"
LOSS = "loss"
MOST_VALUES = 16
"""Metrics of a step beside its loss."""


def makes_own_steps(task: Task) -> bool:
    """Return whether the task steps its optimizers itself."""
    return callable(getattr(task, METHOD, None))


def step_method(task: Task) -> str:
    """Return the method that trains, with its file and line, for errors."""
    return where(task, METHOD if makes_own_steps(task) else "loss")


def require_fits(spec: RunSpec, task: Task, model: nn.Module, train_set: Any) -> None:
    """Raise BadTask for settings that a task with ``training_step`` does not go with."""
    if not makes_own_steps(task):
        return
    train, source = spec.train, where(task, METHOD)
    problems = {
        f"train.micro_batch_size is {train.micro_batch_size}, but {source} gets a rank's whole "
        "share of the global batch. Leave it out, and cut the batch in training_step": (
            train.micro_batch_size != "auto"
        ),
        f"train.precision is {train.precision}, but {source} runs the backward passes. Leave it "
        "out, and use torch.autocast in training_step": train.precision != "fp32",
        f"train.compile is set, but {source} calls the model as it likes. Leave it out, and call "
        "torch.compile in build_model": train.compile,
        "train.unused_parameters is allow, which is always so for a task with training_step. Leave "
        "it out": train.unused_parameters == "allow",
        f"the train set of {where(task, 'build_datasets')} is iterable, whose micro-batches do not "
        f"add up to a rank's share for {source}. Give it __len__ and __getitem__": is_iterable(
            train_set
        ),
    }
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        problems[
            f"{where(task, 'build_model')} returned parameters without a shape. Call the model "
            f"once in build_model: {source} has no first pass that gives them one"
        ] = True
    for problem, is_there in problems.items():
        if is_there:
            raise BadTask(problem)


def checked_values(task: Task, answer: Any) -> dict[str, torch.Tensor]:
    """Return the metrics that ``training_step`` returned, by name. Raises BadTask if they are no
    numbers."""
    source = where(task, METHOD)
    if answer is None:
        return {}
    named = answer if isinstance(answer, Mapping) else {LOSS: answer}
    values = {}
    for name, value in named.items():
        try:
            number = torch.as_tensor(value, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError):
            number = torch.empty(0)
        if not isinstance(name, str) or number.numel() != 1:
            raise BadTask(
                f"{source} returned {value!r:.100} as {name!r}; return the loss, or metrics by "
                "name: numbers or 0-d tensors, each the mean over the batch"
            )
        values[name] = number.detach().reshape(())
    if len(values) > MOST_VALUES:
        raise BadTask(f"{source} returned {len(values)} metrics; return at most {MOST_VALUES}")
    return values


# ---------------------------------------------------------------- build

# The task that a spec names.


def build_task(spec: RunSpec) -> Task:
    """Build it, with its data. Code of the user's is on the path already.

    Raises DataMissing when the data is not on this node, BadTask for code that holds no task.
    """
    if spec.code is not None:
        return build_own_task(spec.code)
    assert spec.task is not None
    if isinstance(spec.task, LanguageModelingSpec):
        return LanguageModeling(spec.task)
    return ImageClassification(spec.task)
