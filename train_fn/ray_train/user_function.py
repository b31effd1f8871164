"""Run a user's Ray Train function or script unchanged, from its beginning to its end, and send
its reports to the run's journal as steps.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import importlib
import inspect
import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray.train
import ray.train.collective
import torch.multiprocessing
from ray.exceptions import RayError

from everstep.spec.code import CodeSpec
from everstep.wire.events import MAX_NAMES, OWN_FILES, REPORTS, EventKind, NameLimit
from storage.run_control import Stop
from train_fn import clock as head_clock
from train_fn import own_loop
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, PeersGone, forget_frames
from train_fn.node.device import keep_if_broken
from train_fn.own_loop import Left, LoopProtection, StopAgreed
from train_fn.ray_train.ray_checkpoints import (
    PARTS_METRIC,
    STEP_METRIC,
    latest_reported,
    parts_of,
    rejected_reports,
)
from train_fn.ray_train.ray_internals import DataParallelTrainer, TrainContext, get_train_context
from train_fn.ray_train.user_script import Interrupted, ScriptRun, close_store, prepare_script
from train_fn.recovery.evidence import StepFailed, describe_error
from train_fn.step.nccl import group_backend
from train_fn.step.peers import end_process_group
from train_fn.step.profiler import StepProfiler
from train_fn.user_code.modules import CodeOnNode, add_to_path, files_on_node, load_named, place_of
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


# ---------------------------------------------------------------- user reports

# The reports of a user's Ray Train function or script: sent to the run's journal as its steps.
#
# The ranks can stop together at each report. If the function protects its loop, its steps are those
# that it commits, and a report only adds metrics.

GUARANTEE = (
    "A train_fn resumes from the newest checkpoint that it reported. Later steps are repeated, and "
    "its own loader decides which samples they use."
)

SCRIPT_GUARANTEE = (
    "A script goes on from the checkpoints that it writes itself: what it did since the last of "
    "them is done again, and which samples it sees is up to its own loader."
)


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

    def __call__(
        self, metrics: dict[str, Any], checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Report to Ray, together with all ranks, then agree with them whether to continue.

        Raise PeersGone if a peer is gone, and StopAgreed if the ranks agreed to stop.
        """
        present = own_loop.present
        if present is not None and present.stop is not None:
            raise StopAgreed(present.stop)  # the function caught the first one
        before = self._context.report_call_index
        protected = protection()
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
                self._emit_values(_numbers(metrics))
            return  # it agrees on a stop when it commits a step
        self.report_restored()
        self._kept = self._kept or checkpoint is not None
        if self._ctx.world_rank == 0:
            self._report_metrics(metrics)
        stop = self._agreed(self._wanted(checkpoint))
        if stop is not None:
            assert present is not None
            present.stop = stop
            raise StopAgreed(stop)
        self._profiler.boundary(self.step)

    def set_restored(self, restored: dict[str, Any]) -> None:
        """Keep the event that says where the function continues until ``begin``."""
        self._restored = restored

    def begin(self, *, may_protect: bool, warnings: Sequence[str] = ()) -> None:
        """Report that the function begins, and where it continues, with ``warnings`` about it.

        A protected loop continues from its own state, which this event would contradict. So a
        function that may protect one sends it no earlier than its first report.
        """
        if not may_protect:
            self.report_restored()
        if self._ctx.world_rank == 0:
            facts = _facts(self._ctx) | ({"warnings": list(warnings)} if warnings else {})
            self._ctx.journal.emit(EventKind.TRAINING_STARTED, facts)

    def report_restored(self) -> None:
        """Report where the function continues, unless that is done, or a protected loop did."""
        restored, self._restored = self._restored, None
        if protection() is not None:
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
            self.report_restored()
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
        self._emit_values({**_numbers(metrics), "step_s": step_s})

    def _emit_values(self, values: dict[str, float | None]) -> None:
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


def protection() -> LoopProtection | None:
    """Return what protects the function's loop; None if it is not protected, or not yet."""
    return own_loop.present.protection if own_loop.present is not None else None


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


# ---------------------------------------------------------------- refused calls

# Refuse calls of a user's function or script that would hang or do nothing in a rank.
#
# A rank holds its share of the cluster while its code runs. A trainer that this code starts would
# wait for that share for ever, and processes that it spawns as ranks would wait for each other.

_TUNE = "ray.tune"
_SUBMIT = "submit the function that it would call: everstep submit --code . --train-fn MODULE:NAME"

NO_DATASETS = (
    "a run has no Ray Data sets, so ray.train.get_dataset_shard has nothing to return. Build the "
    "data set in your function, and divide it by ray.train.torch.prepare_data_loader or es.loader"
)
TUNE_REPORTS = (
    "ray.tune.report reports to nobody here, since no Tuner runs. Call ray.train.report, which "
    "takes the same metrics and a checkpoint; everstep sweep tries values of a spec"
)
TRAINER = (
    "{name}.fit() would wait for ever: the ranks of this run hold what it needs. "
    f"Everstep is the trainer: {_SUBMIT}"
)
TUNER = (
    "{name} would wait for ever: the ranks of this run hold what its trials need. Submit the "
    "function alone (--train-fn MODULE:NAME), and its values by everstep sweep"
)
SPAWNED = (
    "this script starts ranks of its own by torch.multiprocessing.{name}, but Everstep has started "
    "one process for each rank, as torchrun does. Call your function directly, with "
    'int(os.environ["RANK"]) and int(os.environ["WORLD_SIZE"])'
)
NEVER_REPORTS = (
    "no file of the archive names ray.train.report or everstep.train: this function has no steps, "
    "metrics or checkpoints, and begins anew after a failure. Report at least once an epoch"
)


@contextmanager
def refused_calls(*, is_script: bool, uses_tune: bool) -> Iterator[None]:
    """Raise BadTask inside the block where a user's code makes such a call.

    Args:
        is_script: whether the code is a script, whose spawned processes would be ranks.
        uses_tune: whether the code imports Ray Tune, which is not loaded otherwise.
    """
    with ExitStack() as undo:
        _replace(undo, TrainContext, "get_dataset_shard", _refuse(NO_DATASETS))
        _replace(undo, DataParallelTrainer, "fit", _refuse_trainer)
        if is_script:
            for name in ("spawn", "start_processes"):
                _replace(undo, torch.multiprocessing, name, _refuse(SPAWNED.format(name=name)))
        if uses_tune:
            tune = importlib.import_module(_TUNE)
            utils = importlib.import_module(f"{_TUNE}.trainable.trainable_fn_utils")
            for module in (tune, utils):
                _replace(undo, module, "report", _refuse(TUNE_REPORTS))
            _replace(undo, tune, "run", _refuse(TUNER.format(name="ray.tune.run")))
            _replace(undo, tune.Tuner, "fit", _refuse(TUNER.format(name="Tuner.fit")))
        yield


def imports(root: Path, names: Collection[str], module: str) -> bool:
    """Return whether a Python file of an archive imports ``module``, anywhere in it.

    Args:
        root: directory with the archive's files.
        names: their paths in it.
    """
    first = module.partition(".")[0].encode()
    for name in names:
        file = root / name
        if name.endswith(".py") and file.is_file() and first in (source := file.read_bytes()):
            try:
                found = any(_names(node, module) for node in ast.walk(ast.parse(source)))
            except (SyntaxError, ValueError, RecursionError):
                found = module.encode() in source
            if found:
                return True
    return False


def mentions(root: Path, names: Collection[str], word: bytes) -> bool:
    """Return whether a Python file of an archive has ``word`` in it, in any case of letters."""
    files = (root / name for name in names if name.endswith(".py"))
    return any(word in file.read_bytes().lower() for file in files if file.is_file())


def _names(node: ast.AST, module: str) -> bool:
    """Return whether a statement imports ``module`` or a part of it, or a string names it."""
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
        found = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found = [node.value]  # importlib.import_module
    else:
        return False
    return any(name == module or name.startswith(f"{module}.") for name in found)


def _replace(undo: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Set ``owner.name`` until ``undo`` closes."""
    is_own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, new)
    undo.callback(setattr, owner, name, before) if is_own else undo.callback(delattr, owner, name)


def _refuse(message: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise BadTask(message)

    return refuse


def _refuse_trainer(trainer: Any) -> Any:
    raise BadTask(TRAINER.format(name=type(trainer).__name__))
