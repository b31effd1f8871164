"""Run a user's Ray Train function or script unchanged in Ray's worker, whose API it calls, and send
its reports to the run's journal as steps.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import ray
import ray.cloudpickle
import ray.train
import ray.train.collective
import ray.train.torch
import torch
from ray.exceptions import RayError

from everstep.spec.code import CodeSpec
from everstep.wire.events import MAX_NAMES, EventKind, NameLimit
from storage.run_control import Stop
from train_fn import clock as head_clock
from train_fn import own_loop
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, PeersGone, few
from train_fn.node.secrets import process_redactor
from train_fn.own_loop import StopAgreed
from train_fn.ranks import process
from train_fn.ranks.rank import Outside, run_rank
from train_fn.ray_train.ray_checkpoints import (
    PARTS_METRIC,
    STEP_METRIC,
    latest_reported,
    parts_of,
    rejected_reports,
)
from train_fn.ray_train.ray_internals import DataParallelTrainer, TrainContext, get_train_context
from train_fn.recovery.launch import Position, RankJob, RankLaunch
from train_fn.step.nccl import collective_counts
from train_fn.step.profiler import StepProfiler
from train_fn.user_code import function
from train_fn.user_code.function import FunctionReports, protection, refuse
from train_fn.user_code.modules import CodeOnNode, imports, load_named, place_of

logger = logging.getLogger(__name__)


def train(ctx: WorkerContext) -> Stop | None:
    """Run the function to its end (``function.run``)."""
    return function.run(ctx, Reports, refused_calls)


class Reports(FunctionReports):
    """Wrap Ray's ``report`` on one rank."""

    def __init__(self, ctx: WorkerContext) -> None:
        context = get_train_context()
        has_any = context.checkpoint is not None
        step, name = latest_reported(ctx.run_dir) if has_any else (0, None)
        super().__init__(ctx, name, step, rejected_reports(ctx.run_dir))
        self._context = context
        self._report: Callable[..., None] = context.report
        context.report = self
        self._kept = name is not None
        """Whether a report had a checkpoint."""
        self._profiler = StepProfiler(ctx, list)
        self._began = time.perf_counter()
        self._names = NameLimit()
        self._warned_of_limit = False

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

    def close(self, *, failed: bool) -> None:
        """End a profile, since no further report follows."""
        if failed:
            self._profiler.give_up()
        super().close(failed=failed)
        if not failed:
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


# ---------------------------------------------------------------- refused calls

# Refuse calls of a user's function or script that would hang or do nothing in a rank.
#
# A rank holds its share of the cluster while its code runs. A trainer that this code starts would
# wait for that share for ever.

_TUNE = "ray.tune"
_SUBMIT = "submit the function that it would call: everstep submit --code . --train-fn MODULE:NAME"

NO_DATASETS = (
    "the run has no Ray Data sets, so ray.train.get_dataset_shard has nothing to return. Set "
    "code.datasets to the function MODULE:NAME that returns {name: ray.data.Dataset}"
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


@contextmanager
def refused_calls(code: CodeOnNode) -> Iterator[None]:
    """Raise BadTask inside the block where a user's code makes such a call."""
    with ExitStack() as undo:
        _replace(undo, TrainContext, "get_dataset_shard", _datasets(code))
        _replace(undo, DataParallelTrainer, "fit", _refuse_trainer)
        if imports(code.directory, code.names, _TUNE):  # it is not loaded otherwise
            tune = importlib.import_module(_TUNE)
            utils = importlib.import_module(f"{_TUNE}.trainable.trainable_fn_utils")
            for module in (tune, utils):
                _replace(undo, module, "report", refuse(TUNE_REPORTS))
            _replace(undo, tune, "run", refuse(TUNER.format(name="ray.tune.run")))
            _replace(undo, tune.Tuner, "fit", refuse(TUNER.format(name="Tuner.fit")))
        yield


def _datasets(code: CodeOnNode) -> Callable[..., Any]:
    """Return what ``ray.train.get_dataset_shard`` calls. A collective if there are data sets."""
    ctx = None if own_loop.present is None else own_loop.present.ctx
    spec = None if ctx is None else ctx.spec.code
    if ctx is None or spec is None or spec.datasets is None:
        return refuse(NO_DATASETS)  # type: ignore[no-any-return]
    return shards_of(ctx, code, spec)


def _replace(undo: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Set ``owner.name`` until ``undo`` closes."""
    is_own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, new)
    undo.callback(setattr, owner, name, before) if is_own else undo.callback(delattr, owner, name)


def _refuse_trainer(trainer: Any) -> Any:
    raise BadTask(TRAINER.format(name=type(trainer).__name__))


class OwnProcess:
    """This process as a rank (``worker_actor.Rank``). It serves one attempt.

    Args:
        ip: the node's address in the cluster.
        serve: carries out what a rank asks of its host.
    """

    def __init__(self, launch: RankLaunch, ip: str, serve: Callable[..., Any]) -> None:
        self.pid, self._serve = os.getpid(), serve
        process.prepare(launch, ip, over_nccl=bool(ray.get_gpu_ids()))

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        return _CALLS[name](self, *arguments)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Do nothing: the host ends, too."""

    def train(self, job: RankJob, place: Position) -> str | None:
        """Train to the end (``run_rank``)."""
        # A rank that leaves a broken step collects garbage, but does not search all of torch. In
        # forks the zygote has seen to it.
        gc.freeze()
        process.tell_host(lambda name, *told: self._serve("note", (name, told)))
        outside = Outside(
            lambda *batch: self._serve("deliver", batch),
            lambda name, metrics: self._serve("report", (name, metrics)),
            lambda: self._serve("close_reports", ()),
            partial(_device, job.use_gpu),
        )
        return run_rank(job, place, outside)


_CALLS: dict[str, Callable[..., Any]] = {
    "train": OwnProcess.train,
    "ping": lambda rank: None,
    "ask_to_yield": lambda rank, *arguments: process.ask_to_yield(*arguments),
    "abandon": lambda rank: process.abandon(),
    "stack": lambda rank: process_redactor()(process.stack()),
    "collective_counts": lambda rank: collective_counts(),
}


@cache
def _device(use_gpu: bool) -> torch.device:
    """Return the rank's device. Ray numbers it among the GPUs of all ranks on the node, which it
    makes visible to each of them once they are created. A process that had used CUDA by then, for
    example to check its node, still sees only its own."""
    if not use_gpu:
        return torch.device("cpu")
    device: torch.device = ray.train.torch.get_device()
    return device if (device.index or 0) < torch.cuda.device_count() else torch.device("cuda", 0)


# ---------------------------------------------------------------- Ray Data

# Ray Data sets of a user's function: built on rank 0 once an attempt, and split over all ranks as
# Ray's own trainer does. They are built where the function runs and not on the driver: the code and
# its packages are there, and what it raises is an error of the user's, with file and line.


def shards_of(ctx: WorkerContext, code: CodeOnNode, spec: CodeSpec) -> Callable[..., Any]:
    """Return what stands in for ``TrainContext.get_dataset_shard`` on this rank. A collective.

    The function ``datasets`` of the spec returns the data sets, and a ``ray.train.DataConfig``
    beside them if they are not all to be split. It gets the config if it has a parameter. Raises
    BadTask on rank 0 if it returns anything else.
    """
    built, entry = None, str(spec.datasets)
    if ctx.world_rank == 0:
        _warn_of_no_room()
        datasets, config = _built(entry, dict(spec.config), code.directory)
        built = config.configure(
            datasets, ctx.world_size, worker_handles=None, worker_node_ids=None
        )
    of_ranks: list[dict[str, Any]] = ray.train.collective.broadcast_from_rank_zero(built)
    own = of_ranks[ctx.world_rank]

    def get_dataset_shard(_: Any, dataset_info: Any) -> Any:
        name = dataset_info.dataset_name
        if name not in own:
            raise BadTask(
                f"ray.train.get_dataset_shard({name!r}): {entry} returned the data sets "
                f"{few(sorted(own))}; ask for one of them"
            )
        return own[name]

    return get_dataset_shard


def _built(
    entry: str, given: dict[str, Any], directory: Path
) -> tuple[dict[str, Any], ray.train.DataConfig]:
    """Call the user's function, and return what it returns. Raises BadTask."""
    from ray.data import Dataset

    function = load_named(entry)
    if not callable(function):
        raise BadTask(
            f"{entry} is a {type(function).__name__}, not a function. Set code.datasets to a "
            "function that returns {name: ray.data.Dataset}"
        )
    said = function(*([given] if inspect.signature(function).parameters else []))
    found, config = said if isinstance(said, tuple) and len(said) == 2 else (said, None)
    config = ray.train.DataConfig() if config is None else config
    is_named = isinstance(found, Mapping) and all(isinstance(name, str) for name in found)
    if not is_named or not found or not all(isinstance(each, Dataset) for each in found.values()):
        raise BadTask(
            f"{entry}{place_of(function)} returned {found!r:.200}; return a dict with a "
            "ray.data.Dataset for each name"
        )
    if not isinstance(config, ray.train.DataConfig):
        raise BadTask(
            f"{entry}{place_of(function)} returned a {type(config).__name__} beside its data sets; "
            "return a ray.train.DataConfig, or the data sets alone"
        )
    # Ray Data's processes do not have the archive: what they call travels as it is.
    for name, module in [*sys.modules.items()]:
        path = getattr(module, "__file__", None)
        is_own = isinstance(path, str) and directory in Path(path).parents
        if is_own and module.__name__ == name:
            ray.cloudpickle.register_pickle_by_value(module)
    return dict(found), config


def _warn_of_no_room() -> None:
    free = ray.available_resources().get("CPU", 0.0)
    if free < 1.0:  # what a task of Ray Data takes by default
        logger.warning(
            "Ray Data's tasks take CPUs beside those of the ranks, and the cluster has %g free: "
            "reading waits until some are. Lower scaling.max_workers or "
            "scaling.resources_per_worker, or add nodes",
            free,
        )
