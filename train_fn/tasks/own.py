"""Load a user's task: a plain class, found by its name and built with the spec's arguments."""

from __future__ import annotations

import inspect

from everstep.spec.user_code import CodeSpec
from train_fn.errors import BadTask
from train_fn.recovery.error_text import ended_program
from train_fn.tasks.own_step import makes_own_steps
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
