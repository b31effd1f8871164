"""Run a user's Ray Train function or script unchanged. Its reports go to the run's journal, and it
can be stopped at each of them.

A report is a step of such a run. The function has what Ray provides (``ray.train.get_checkpoint``).
States in shared memory, the exact sampler and the sample ledger belong to Everstep's own loop, and
to a function that calls ``everstep.train.protect``: its steps are those that it commits, and a
report beside them only adds metrics.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import ray.train
import ray.train.collective
from ray.exceptions import RayError

from everstep.spec.user_code import CodeSpec
from everstep.wire.events import OWN_FILES, EventKind
from everstep.wire.metric_names import MAX_NAMES, NameLimit
from storage.run_control import Stop
from train_fn import clock as head_clock
from train_fn import own_loop
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, PeersGone, forget_frames
from train_fn.own_loop import Protection, StopAgreed
from train_fn.profiling.profiler import StepProfiler
from train_fn.ray_train.checkpoint_list import STEP_METRIC, latest_reported, rejected_reports
from train_fn.ray_train.ray_internals import get_train_context
from train_fn.ray_train.user_checkpoints import PARTS_METRIC, parts_of
from train_fn.ray_train.user_script import ScriptRun, close_store, prepare_script
from train_fn.recovery.rank_error import StepFailed, describe_error
from train_fn.step.nccl import group_backend
from train_fn.step.peers import end_process_group
from train_fn.user_code.modules import add_to_path, load_named, place_of
from train_fn.user_code.packages import bring_packages

GUARANTEE = (
    "A train_fn resumes from the newest checkpoint that it reported. Later steps are repeated, and "
    "its own loader decides which samples they use."
)

SCRIPT_GUARANTEE = (
    "A script goes on from the checkpoints that it writes itself: what it did since the last of "
    "them is done again, and which samples it sees is up to its own loader."
)

DOOR = "everstep.train"
"""Module that a function with a protected loop imports."""

logger = logging.getLogger(__name__)


class Reports:
    """Wrap Ray's ``report`` on one rank.

    Args:
        ctx: the rank's place in its attempt.
        context: Ray's TrainContext.
        step: number of reports so far.
        kept: whether one of them had a checkpoint.
    """

    def __init__(self, ctx: WorkerContext, context: Any, step: int, *, kept: bool) -> None:
        self.step = step
        self._ctx = ctx
        self._context = context
        self._report: Callable[..., None] = context.report
        self._kept = kept
        self._profiler = StepProfiler(ctx, list)
        self._began = time.perf_counter()
        self._names = NameLimit()
        self.has_reported = False
        """Whether this attempt has made a report, at which it can stop."""
        self._warned_of_limit = False
        self._restored: dict[str, Any] | None = None
        """Where the function goes on, until that is reported."""
        self.stop: Stop | None = None
        """The stop request that the ranks agreed on."""

    def __call__(
        self, metrics: dict[str, Any], checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Report to Ray, together with all ranks, then agree with them whether to continue.

        Raise PeersGone if a peer is gone, and StopAgreed if the ranks agreed to stop.
        """
        before = self._context.report_call_index
        protected = _protection()
        step = self.step + 1 if protected is None else protected.step_number
        beside = {STEP_METRIC: step} | (
            {} if checkpoint is None else {PARTS_METRIC: parts_of(checkpoint)}
        )
        self._report({**metrics, **beside}, checkpoint, *args, **kwargs)
        if self._context.report_call_index == before:
            raise PeersGone("a report was aborted: another rank is gone")
        self.step = step
        self.has_reported = True
        if protected is not None:
            if self._ctx.world_rank == 0:
                self._tell_values(_numbers(metrics))
            return  # it agrees on a stop when it commits a step
        self.tell_restored()
        self._kept = self._kept or checkpoint is not None
        if self._ctx.world_rank == 0:
            self._report_metrics(metrics)
        self.stop = self._agreed(self._wanted(checkpoint))
        if self.stop is not None:
            raise StopAgreed(self.stop)
        self._profiler.boundary(self.step)

    def hold_restored(self, restored: dict[str, Any]) -> None:
        """Keep the event that says where the function continues until ``begin``."""
        self._restored = restored

    def begin(self, *, may_protect: bool) -> None:
        """Report that the function begins, and where it continues.

        A protected loop continues from its own state, and would be told to begin anew by this. So
        a function that may protect one reports it no earlier than its first report.
        """
        if not may_protect:
            self.tell_restored()
        if self._ctx.world_rank == 0:
            self._ctx.journal.emit(EventKind.TRAINING_STARTED, _facts(self._ctx))

    def tell_restored(self) -> None:
        """Report where the function continues, unless that is done, or a protected loop did."""
        restored, self._restored = self._restored, None
        if _protection() is not None:
            return
        if own_loop.present is not None:
            own_loop.present.has_begun = True
        if restored is not None:
            self._ctx.journal.emit(EventKind.RESTORED, restored)

    def close(self, *, failed: bool) -> None:
        """End a profile, since no further report follows."""
        if failed:
            self._profiler.give_up()
        else:
            self.tell_restored()
            self._profiler.close()

    def _wanted(self, checkpoint: Any) -> Stop | None:
        """Return the stop request that this rank knows of. If the function reports checkpoints, a
        pause or resize waits for a report with one."""
        stop = self._ctx.journal.stop_requested
        return None if stop == "pause" and self._kept and checkpoint is None else stop

    def _agreed(self, wanted: Stop | None) -> Stop | None:
        """Return rank 0's stop request on every rank. Raise PeersGone if a peer is gone."""
        try:
            agreed: Stop | None = ray.train.collective.broadcast_from_rank_zero(wanted)
        except RayError as exc:
            raise PeersGone(
                f"the ranks could not agree on whether to continue: {type(exc).__name__}: {exc}"
            ) from exc
        return agreed

    def _report_metrics(self, metrics: dict[str, Any]) -> None:
        """Send the numbers of a report to the journal as a step's metrics."""
        now = time.perf_counter()
        step_s, self._began = now - self._began, now
        self._tell_values({**_numbers(metrics), "step_s": step_s})

    def _tell_values(self, values: dict[str, float | None]) -> None:
        if refused := self._names.refused(values, always=("step_s",)):
            values = {name: value for name, value in values.items() if name in self._names.known}
            if not self._warned_of_limit:
                self._warned_of_limit = True
                words = (
                    "a run has at most %d names of metrics: %d more are ignored from now on, "
                    "for example %r. Report fewer"
                )
                logger.warning(words, MAX_NAMES, len(refused), refused[0][:100])
        self._ctx.journal.emit(
            EventKind.METRICS,
            {"points": [{"step": self.step, "at": head_clock.now(), "values": values}]},
        )


def train(ctx: WorkerContext) -> Stop | None:
    """Run the function until it returns, or until the report at which the ranks agreed to stop.
    Return the stop request, or None.

    Raise StepFailed for every error. By then the rank has released its peers.
    """
    reports, failed = None, None
    try:
        own_loop.present = own_loop.OwnLoop(ctx)
        reports, script = _begin(ctx)
        if script is None:
            _call(ctx, reports)
        else:
            reports.begin(may_protect=script.mentions(DOOR))
            reports.stop = script.run(
                ctx, takes_stops=lambda: reports.has_reported or _protection() is not None
            )
        reports.close(failed=False)
        return reports.stop
    except StopAgreed as exc:
        assert reports is not None
        reports.close(failed=False)
        return exc.stop
    except BaseException as exc:
        if reports is not None:
            reports.close(failed=True)
        failed = _leave(ctx, exc, reports.step if reports is not None else None)
    finally:
        own_loop.present = None
    # Raised outside the handler: a context would keep alive the function's frames, and with them
    # the process group.
    raise failed


def _begin(ctx: WorkerContext) -> tuple[Reports, ScriptRun | None]:
    """Wrap Ray's ``report``, and send an event with the step at which the function or script
    continues."""
    bring_packages(ctx)
    script = prepare_script(ctx) if ctx.spec.runs_script else None
    if script is None:
        add_to_path(ctx.run_dir.storage, _code(ctx).archive)
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
        restored["rejected"] = [
            {"name": each, "problem": problem} for each, problem in rejected.items()
        ]
        reports.hold_restored(restored)
    return reports, script


def _call(ctx: WorkerContext, reports: Reports) -> None:
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
    reports.begin(may_protect=DOOR in sys.modules)
    function(*([config] if num_required else []))


def _protection() -> Protection | None:
    """Return what protects the function's loop; None if it is not protected, or not yet."""
    return own_loop.present.protection if own_loop.present is not None else None


def _leave(ctx: WorkerContext, cause: BaseException, step: int | None) -> StepFailed:
    """Release the peers, and return the error. Only the neighbours of a dead rank notice its death
    by themselves.

    A protected loop has done so, and left its state, before its function's own clean-up could raise
    anything else.
    """
    protected = _protection()
    if protected is not None and protected.left is not None:
        forget_frames(cause)
        return StepFailed(protected.left.error, protected.left.problem)
    error = describe_error(cause, ctx.world_rank)
    forget_frames(cause)
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


def _numbers(metrics: dict[str, Any]) -> dict[str, float | None]:
    """Return the metrics that are numbers. A number that is not finite becomes None."""
    values = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        values[str(name)] = number if math.isfinite(number) else None
    return values


def _facts(ctx: WorkerContext) -> dict[str, Any]:
    """Return the data of ``training_started``. Unlike Everstep's loop, a function does not reveal
    its number of steps or parameters."""
    unknown = dict.fromkeys(
        ("total_steps", "steps_per_epoch", "num_samples", "num_parameters", "micro_batch_size")
    )
    return {
        **unknown,
        "snapshots": "none",
        "guarantee": SCRIPT_GUARANTEE if ctx.spec.runs_script else GUARANTEE,
        "device": str(ctx.device),
        "backend": group_backend(ctx.device),
    }
