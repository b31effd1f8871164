"""Progress reports: rank 0 sends them to the journal, and every rank keeps the newest ones with
its state."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from everstep.wire.events import MAX_NAMES, MAX_STEP_NAMES, EventKind, NameLimit, validation_name
from train_fn import clock as head_clock
from train_fn.context import WorkerContext
from train_fn.session.speed import SAMPLES_ALONE, Speed
from train_fn.state.run_state import RunState

logger = logging.getLogger(__name__)

HAND_OVER_S = 0.1
"""How long metrics are gathered before they are sent, while steps are shorter: each time costs a
step 0.02 ms."""
DATA_WAIT = "data_wait"
"""Metric: the share of a step in which a rank waited for its loader."""
_METRICS = EventKind.METRICS
_METRICS_KIND = _METRICS.value


class Reporter:
    """Reports metrics and events. Every rank calls it with the same values.

    After a recovery it reports again what a dead rank 0 has not delivered. Readers fold events
    by step and epoch, so an event that is reported twice changes nothing.

    Args:
        speed: what samples per second are in other units.
    """

    def __init__(
        self,
        ctx: WorkerContext,
        state: RunState,
        speed: Speed = SAMPLES_ALONE,
    ) -> None:
        self._speed = speed
        self._journal = ctx.journal if ctx.world_rank == 0 else None
        self._journaled_step = ctx.journaled_step
        self._state = state
        self._late_points: list[dict[str, Any]] = []
        self._points: list[dict[str, Any]] = []
        self._events: list[tuple[int, EventKind, dict[str, Any]]] = []
        """Events that wait until their step may be reported."""
        self._newest = math.inf
        """Steps up to this one may be reported."""
        self._names = NameLimit()
        self._warned_of_limit = False
        self._hand_over_at = float("-inf")
        self._step_began = self._epoch_began = time.perf_counter()

    def step_done(
        self,
        values: dict[str, float | None],
        num_samples: int | None,
        proof: dict[str, Any] | None = None,
        waited_s: float | None = None,
        num_tokens: int | None = None,
    ) -> float:
        """Report a step's metrics. Return the seconds since the step before it.

        Args:
            values: None for a metric that is not finite. The step's speed is added here.
            num_samples: samples of the global batch; None if they are not known.
            proof: digests of the step; None for a user's own loop.
            waited_s: how long a rank waited for its data, the longest of all ranks; None if that is
                not known.
            num_tokens: tokens of the global batch; None if no lengths of samples say it.
        """
        now, at = time.perf_counter(), head_clock.now()
        step_s, self._step_began = now - self._step_began, now
        if not values.keys() <= self._names.known:
            self._leave_out(values, self._names.refused(values, MAX_STEP_NAMES))
        values["step_s"] = step_s
        if num_samples is not None:
            values["samples_per_s"] = samples_per_s = num_samples / step_s
            values.update(self._speed.figures(samples_per_s))
        if num_tokens is not None:
            values["tokens_per_s"] = num_tokens / step_s
        if waited_s is not None:
            values.setdefault(DATA_WAIT, min(1.0, waited_s / step_s))
        point = {"step": self._state.step, "at": at, "values": values}
        if proof is not None:
            point["proof"] = proof
        self._state.recent.add_point(
            {"kind": _METRICS_KIND, "at": at, "data": point}, self._journaled_step
        )
        if self._journal is not None:
            self._points.append(point)
            if now >= self._hand_over_at:
                self.hand_over()
        return step_s

    def limited(self, metrics: dict[str, float], best_metric: str | None) -> dict[str, float]:
        """Return an evaluation's metrics up to the run's limit of names. The best metric always
        stays."""
        always = () if best_metric is None else (best_metric, validation_name(best_metric))
        kept = dict(metrics)
        self._leave_out(kept, self._names.refused(metrics, always=always))
        return kept

    def _leave_out(self, values: dict[str, Any], names: list[str]) -> None:
        for name in names:
            del values[name]
        if names and not self._warned_of_limit:
            self._warned_of_limit = True
            logger.warning(
                "a run has at most %d names of metrics, %d of them of steps: %d more are left out "
                "from here on, such as %r; "
                "report fewer, or sum them up",
                *(MAX_NAMES, MAX_STEP_NAMES, len(names), names[0][:100]),
            )

    def hand_over(self) -> None:
        """Send all gathered metrics to the journal. Call it before anything that may take long."""
        points = [each for each in self._points if each["step"] <= self._newest]
        if self._journal is None or not points:
            return
        # In one event: once the journal has this step, it has all those before it.
        self._journal.emit(_METRICS, {"points": self._late_points + points})
        self._points, self._late_points = self._points[len(points) :], []
        self._hand_over_at = time.perf_counter() + HAND_OVER_S

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Report an event between two steps."""
        self.hand_over()
        entry = {"kind": kind.value, "at": head_clock.now(), "data": data, "step": self._state.step}
        self._state.recent.add_other(entry, self._journaled_step)
        if self._state.step > self._newest:
            self._events.append((self._state.step, kind, data))
        elif self._journal is not None:
            self._journal.emit(kind, data)

    def report_up_to(self, step: float) -> None:
        """Report nothing of later steps until the next call: they may have to be made again. Until
        the first call, all steps are reported at once."""
        self._newest = step
        waiting, self._events = self._events, []
        if waiting:
            self.hand_over()
        for at, kind, data in waiting:
            if at > step:
                self._events.append((at, kind, data))
            elif self._journal is not None:
                self._journal.emit(kind, data)

    def sign(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Report a sign of life, which is not reported again after a recovery."""
        if self._journal is not None:
            self._journal.emit(kind, data)

    def report_again(self) -> None:
        """After a restore, report again what the journal may lack of the steps before it.

        However long ago that was: the journal may have been away for many slow steps. Metrics
        travel with the attempt's first step.
        """
        if self._journal is None:
            return
        journaled = self._journaled_step()
        if math.isinf(journaled):
            journaled = -1  # nobody knows
        tail = self._state.recent
        self._late_points = [
            entry["data"] for entry in tail.points if entry["data"]["step"] > journaled
        ]
        for entry in tail.others:
            if (at := entry["step"]) < journaled:
                continue
            if at > self._newest:
                self._events.append((at, EventKind(entry["kind"]), entry["data"]))
            else:
                self._journal.emit(EventKind(entry["kind"]), entry["data"])

    def seconds_of_epoch(self) -> float:
        """Return how long the epoch that ends now took in this attempt."""
        began, self._epoch_began = self._epoch_began, time.perf_counter()
        return self._epoch_began - began

    def start_clock(self) -> None:
        """Let the next step's time begin now."""
        self._step_began = time.perf_counter()

    def close(self) -> None:
        """Report what is left, also metrics from before the restore that no step took along."""
        points = [*self._points, *self._late_points]
        self._points = [each for each in points if each["step"] <= self._newest]
        self._late_points = []
        self.hand_over()
