"""The reports of a user's Ray Train function or script: sent to the run's journal as its steps.

The ranks can stop together at each report. If the function protects its loop, its steps are those
that it commits, and a report only adds metrics.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray.train
import ray.train.collective
from ray.exceptions import RayError

from everstep.wire.events import EventKind
from everstep.wire.metric_names import MAX_NAMES, NameLimit
from storage.run_control import Stop
from train_fn import clock as head_clock
from train_fn import own_loop
from train_fn.context import WorkerContext
from train_fn.errors import PeersGone
from train_fn.own_loop import Protection, StopAgreed
from train_fn.profiling.profiler import StepProfiler
from train_fn.ray_train.checkpoint_list import STEP_METRIC
from train_fn.ray_train.user_checkpoints import PARTS_METRIC, parts_of
from train_fn.step.nccl import group_backend

GUARANTEE = (
    "A train_fn resumes from the newest checkpoint that it reported. Later steps are repeated, and "
    "its own loader decides which samples they use."
)

SCRIPT_GUARANTEE = (
    "A script goes on from the checkpoints that it writes itself: what it did since the last of "
    "them is done again, and which samples it sees is up to its own loader."
)

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


def protection() -> Protection | None:
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
