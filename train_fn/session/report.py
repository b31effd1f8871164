"""Progress reports: rank 0 sends them to the journal, and every rank keeps the newest ones with
its state. Beside samples they tell how fast a run trains.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from everstep.wire.events import MAX_NAMES, MAX_STEP_NAMES, EventKind, NameLimit, validation_name
from train_fn import clock as head_clock
from train_fn.context import WorkerContext
from train_fn.errors import BadTask
from train_fn.state.run_state import RunState
from train_fn.tasks.protocol import Task

# ---------------------------------------------------------------- speed

# How fast a run trains, beside samples: tokens, and floating-point operations (FLOPs), also as a
# share of what its devices can do (MFU).
#
# A task may say what a sample takes, or let torch count it: then its ``loss`` is called once on the
# meta device, which computes nothing, so that a run's bits, gradients, buffers and random numbers
# stay as they are. Everstep's own tasks do that. No other task is called once more without having
# said so: what else its ``loss`` changes is not known.


def _with_tf32(half: float) -> dict[str, float]:
    """Return the FLOP/s of a device that does half as many with TF32, in fp32, as in 16 bits."""
    return {"bf16": half, "fp16": half, "fp32": half / 2}


_PEAKS: dict[str, dict[str, float]] = {
    r"A100": _with_tf32(312e12),
    r"H100 80GB": _with_tf32(989e12),
    r"H100 NVL": _with_tf32(835e12),
    r"H100 PCIe": _with_tf32(756e12),
    r"H200 NVL": _with_tf32(835e12),
    r"H200": _with_tf32(989e12),
    r"B200": _with_tf32(2250e12),
    r"L40S": _with_tf32(362e12),
    r"L4": _with_tf32(121e12),
    r"A10": _with_tf32(125e12),
    r"V100-SXM\d": {"fp16": 125e12, "fp32": 15.7e12},
    r"V100-PCIE": {"fp16": 112e12, "fp32": 14e12},
    r"T4": {"fp16": 65e12, "fp32": 8.1e12},
}
"""FLOP/s of dense products, as NVIDIA publishes them, by words of the device's name and precision.
The first that fits counts."""


@dataclass(frozen=True)
class Speed:
    """What the speed in samples means in other units; None for what is not known."""

    flops_per_sample: float | None = None
    """Of forward and backward pass."""
    tokens_per_sample: float | None = None
    peak_flops_per_s: float | None = None
    """Of all ranks' devices together."""

    def figures(self, samples_per_s: float) -> dict[str, float]:
        """Return the metrics of a step that follow from its samples per second."""
        found = {}
        if self.tokens_per_sample is not None:
            found["tokens_per_s"] = samples_per_s * self.tokens_per_sample
        if self.flops_per_sample is not None:
            flops_per_s = samples_per_s * self.flops_per_sample
            found["tflops_per_s"] = flops_per_s / 1e12
            if self.peak_flops_per_s is not None:
                found["mfu"] = flops_per_s / self.peak_flops_per_s
        return found


SAMPLES_ALONE = Speed()
"""Nothing else is known."""


def speed_of(ctx: WorkerContext, task: Task, counted: float | None) -> Speed:
    """Return what is known of a run's speed.

    Args:
        counted: FLOPs of a sample, for a task that does not say.

    Raises BadTask for a task that says something else than a positive number.
    """
    flops = declared(task, "flops_per_sample")
    peak = peak_flops_per_s(ctx.device, ctx.spec.train.precision)
    return Speed(
        counted if flops is None else flops,
        declared(task, "tokens_per_sample"),
        None if peak is None else peak * ctx.world_size,
    )


def declared(task: Task, name: str) -> float | None:
    """Return a positive number that the task says, as an attribute or by a method without
    arguments; None if it does not."""
    said: Any = getattr(task, name, None)
    value = said() if callable(said) else said
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise BadTask(
            f"{name} of {type(task).__name__} is {value!r:.100}; set it to a positive number, or "
            "leave it out"
        )
    return float(value)


def counted_flops(task: Task, model: nn.Module, batch: Any, num_samples: int) -> float | None:
    """Return the FLOPs that a sample takes forward and backward, from shapes alone. None if the
    task does not set ``count_flops``, if they cannot be counted, or there are none."""
    if getattr(task, "count_flops", False) is not True:
        return None
    from torch.func import functional_call  # both take long to import
    from torch.utils.flop_counter import FlopCounterMode

    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def stand_in(*inputs: Any, **named: Any) -> Any:
        return functional_call(model, shaped, inputs, named)

    try:
        shaped = {name: _shape_of(value) for name, value in held.items()}
        trained = [each for each in shaped.values() if each.requires_grad]
        with FlopCounterMode(display=False) as counter, torch.enable_grad():
            loss_sum, _ = task.loss(stand_in, _shapes_in(batch))  # type: ignore[arg-type]
            torch.autograd.grad(loss_sum, trained, allow_unused=True)
    except Exception as exc:  # a figure less, and nothing else
        logger.debug("the FLOPs of a sample cannot be counted: %s", exc)
        return None
    return counter.get_total_flops() / num_samples or None


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind that has no values."""
    return torch.empty(
        tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
    )


def _shapes_in(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return _shape_of(batch)
    if isinstance(batch, dict):
        return {name: _shapes_in(value) for name, value in batch.items()}
    return type(batch)(map(_shapes_in, batch)) if type(batch) in (list, tuple) else batch


def peak_flops_per_s(device: torch.device, precision: str) -> float | None:
    """Return the FLOP/s that a device can do; None for a CPU, and where it is not known."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), precision)


def peak_of(device_name: str, precision: str) -> float | None:
    """Return the published FLOP/s of a GPU by its name, such as ``NVIDIA H100 80GB HBM3``. None for
    others, and for parts of one (MIG)."""
    if re.search(r"\bMIG\b", device_name):
        return None
    found = (peaks for name, peaks in _PEAKS.items() if re.search(rf"\b{name}\b", device_name))
    return next(found, {}).get(precision)


# ---------------------------------------------------------------- reporter

logger = logging.getLogger(__name__)

HAND_OVER_S = 0.1
"""How long metrics are gathered before they are sent, while steps are shorter: each time costs a
step 0.02 ms."""
_METRICS = EventKind.METRICS
_METRICS_KIND = _METRICS.value


class Reporter:
    """Reports metrics and events. Every rank calls it with the same values.

    After a recovery it reports again what a dead rank 0 has not delivered. Readers fold events
    by step and epoch, so an event that is reported twice changes nothing.

    Args:
        complete: completes the proofs of the steps so far (``Chain.enter``).
        speed: what samples per second are in other units.
    """

    def __init__(
        self,
        ctx: WorkerContext,
        state: RunState,
        complete: Callable[[], object] = lambda: None,
        speed: Speed = SAMPLES_ALONE,
    ) -> None:
        self._complete = complete
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
    ) -> float:
        """Report a step's metrics. Return the seconds since the step before it.

        Args:
            values: None for a metric that is not finite. The step's speed is added here.
            num_samples: samples of the global batch; None if they are not known.
            proof: digests of the step, complete before it is sent; None for a user's own loop.
        """
        now, at = time.perf_counter(), head_clock.now()
        step_s, self._step_began = now - self._step_began, now
        if not values.keys() <= self._names.known:
            self._leave_out(values, self._names.refused(values, MAX_STEP_NAMES))
        values["step_s"] = step_s
        if num_samples is not None:
            values["samples_per_s"] = samples_per_s = num_samples / step_s
            values.update(self._speed.figures(samples_per_s))
        point = {"step": self._state.step, "at": at, "values": values}
        if proof is not None:
            point["proof"] = proof
        self._state.tail.add_point(
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
        self._complete()
        # In one event: once the journal has this step, it has all those before it.
        self._journal.emit(_METRICS, {"points": self._late_points + points})
        self._points, self._late_points = self._points[len(points) :], []
        self._hand_over_at = time.perf_counter() + HAND_OVER_S

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Report an event between two steps."""
        self.hand_over()
        entry = {"kind": kind.value, "at": head_clock.now(), "data": data, "step": self._state.step}
        self._state.tail.add_other(entry, self._journaled_step)
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
        tail = self._state.tail
        self._late_points = [
            entry["data"] for entry in tail.points if entry["data"]["step"] > journaled
        ]
        for entry in tail.others:
            if (at := entry.get("step", journaled)) < journaled:
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
