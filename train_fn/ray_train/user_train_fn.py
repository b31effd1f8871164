"""Run a user's Ray Train function or script unchanged, from its beginning to its end.

The function has what Ray provides (``ray.train.get_checkpoint``). States in shared memory, the
exact sampler and the sample ledger belong to Everstep's own loop, and to a function that calls
``everstep.train.protect``.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import logging
import sys
from typing import Any

from everstep.spec.user_code import CodeSpec
from everstep.wire.events import OWN_FILES, REPORTS
from storage.run_control import Stop
from train_fn import own_loop
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, forget_frames
from train_fn.node.broken_device import keep_if_broken
from train_fn.own_loop import Left, StopAgreed
from train_fn.ray_train.checkpoint_list import latest_reported, rejected_reports
from train_fn.ray_train.ray_internals import get_train_context
from train_fn.ray_train.refused_calls import NEVER_REPORTS, imports, mentions, refused_calls
from train_fn.ray_train.user_reports import Reports, protection
from train_fn.ray_train.user_script import Interrupted, ScriptRun, close_store, prepare_script
from train_fn.recovery.rank_error import StepFailed, describe_error
from train_fn.step.peers import end_process_group
from train_fn.user_code.modules import (
    CodeOnNode,
    add_to_path,
    files_on_node,
    load_named,
    place_of,
)
from train_fn.user_code.packages import bring_packages

DOOR = "everstep.train"
"""Module that a function with a protected loop imports."""

logger = logging.getLogger(__name__)


def train(ctx: WorkerContext) -> Stop | None:
    """Run the function to its end. Return the stop on which the ranks agreed meanwhile, or None.

    Raise StepFailed for every error. By then the rank has released its peers.
    """
    present = own_loop.present = own_loop.OwnLoop(ctx)
    reports, error = None, None
    try:
        reports, script, code = _begin(ctx)
        with refused_calls(
            is_script=script is not None,
            uses_tune=imports(code.directory, code.names, "ray.tune"),
        ):
            may_protect = imports(code.directory, code.names, DOOR)
            if script is None:
                _call(ctx, reports, code, may_protect=may_protect)
            else:
                reports.begin(may_protect=may_protect)
                script.run(
                    present, takes_stops=lambda: reports.has_reported or protection() is not None
                )
    except BaseException as exc:
        error = exc
    try:
        return _end(present, reports, error)
    finally:
        own_loop.present = None


def _end(
    present: own_loop.OwnLoop, reports: Reports | None, error: BaseException | None
) -> Stop | None:
    """End the rank's part in the attempt. Return the stop, or None if the function finished. Raise
    StepFailed.

    Not called by a handler of ``error``: a context would keep alive the function's frames, and with
    them the process group.

    Args:
        error: what the function raised.
    """
    failure = present.failure(error)
    if reports is not None:
        reports.close(failed=failure is not None)
    if failure is not None:
        raise _leave(present.ctx, failure, error, reports.step if reports is not None else None)
    if error is not None and not isinstance(error, StopAgreed | Interrupted):
        logger.warning("the code raised after the ranks agreed to %s", present.stop, exc_info=error)
        forget_frames(error)
    return present.stop


def _begin(ctx: WorkerContext) -> tuple[Reports, ScriptRun | None, CodeOnNode]:
    """Wrap Ray's ``report``, and send an event with the step at which the function or script
    continues. Return the wrapped reports, the script if it is one, and the code's files."""
    bring_packages(ctx)
    script = prepare_script(ctx) if ctx.spec.runs_script else None
    if script is None:
        add_to_path(ctx.run_dir.storage, _code(ctx).archive)
    code = files_on_node(ctx.run_dir.storage, _code(ctx).archive)
    context = get_train_context()
    step, name = latest_reported(ctx.run_dir) if context.checkpoint is not None else (0, None)
    if script is not None and name is None:
        step = ctx.steps_before
    rejected = rejected_reports(ctx.run_dir)
    context.report = reports = Reports(ctx, context, step, kept=name is not None)
    if ctx.world_rank == 0:
        beginning = OWN_FILES if script is not None and ctx.attempt > 1 else "fresh"
        source = beginning if name is None else "checkpoint"
        restored: dict[str, Any] = {"step": step, "epoch": 0, "source": source, "checkpoint": name}
        if source != OWN_FILES:
            restored["unit"] = REPORTS
        restored["rejected"] = [
            {"name": each, "problem": problem} for each, problem in rejected.items()
        ]
        reports.set_restored(restored)
    return reports, script, code


def _call(ctx: WorkerContext, reports: Reports, code: CodeOnNode, *, may_protect: bool) -> None:
    """Call the function as Ray Train does: with its config, or without arguments if it takes none.

    Raise BadTask if it cannot be called like this.
    """
    entry, config = _code(ctx).train_fn, dict(_code(ctx).config)
    assert entry is not None
    function = load_named(entry)
    if not callable(function):
        raise BadTask(
            f"{entry} is a {type(function).__name__}, not a function. Set code.train_fn to a "
            "function with one argument, its config"
        )
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    num_required = sum(
        each.default is each.empty and each.kind not in variadic for each in parameters
    )
    if num_required > 1:
        raise BadTask(
            f"{entry}{place_of(function)} needs {num_required} arguments, but a train_fn is called "
            "with its config only. Give the other arguments defaults"
        )
    if config and not num_required:
        raise BadTask(
            f"{entry}{place_of(function)} needs no argument, so Ray Train calls it without "
            "code.config; let it take one, or remove code.config"
        )
    logger.info("calling %s", entry)
    may_protect = may_protect or DOOR in sys.modules  # an installed package may use it
    may_report = may_protect or mentions(code.directory, code.names, b"report")
    reports.begin(may_protect=may_protect, warnings=() if may_report else (NEVER_REPORTS,))
    function(*([config] if num_required else []))


def _leave(
    ctx: WorkerContext,
    failure: BaseException | Left,
    raised: BaseException | None,
    step: int | None,
) -> StepFailed:
    """Release the peers, and return the error. Only the neighbours of a dead rank notice its death
    by themselves. A protected loop has done so, and left its state."""
    error = None if isinstance(failure, Left) else describe_error(failure, ctx.world_rank)
    if raised is not None and not keep_if_broken(ctx.device, raised):
        forget_frames(raised)
    if isinstance(failure, Left):
        return StepFailed(failure.error, failure.problem)
    assert error is not None
    gc.collect()
    end_process_group()
    close_store()
    is_script = ctx.spec.runs_script
    step = None if is_script and not step else step  # without reports no step is known
    error = dataclasses.replace(error, step=step, phase="script" if is_script else "train_fn")
    return StepFailed(error, "the user's own loop keeps its state in its own checkpoints")


def _code(ctx: WorkerContext) -> CodeSpec:
    assert ctx.spec.code is not None
    return ctx.spec.code
