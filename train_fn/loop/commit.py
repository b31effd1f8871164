"""The commit of a step: a gate that only a whole step passes, then the update of the state."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch

from train_fn.errors import BadTask, NonFiniteLoss, StepNotWhole
from train_fn.loop.replica import Replica
from train_fn.loop.training import Training
from train_fn.samples.ledger import Count
from train_fn.state.chain import Link
from train_fn.state.optim import drop_gradients, lr_factor
from train_fn.state.sound_state import not_finite
from train_fn.step.step_totals import StepTotals
from train_fn.tasks.checks import where
from train_fn.tasks.own_step import step_method


def require_whole(replica: Replica, totals: StepTotals) -> None:
    """Let a step pass only if all ranks and samples are in it and its loss is finite. All ranks
    decide alike, by the same totals.

    Raises:
        StepNotWhole: ranks or samples are missing.
        NonFiniteLoss: the loss of a rank is NaN or infinite.
        BadTask: the weights that the task's loss returned do not add up to a positive number.
    """
    state = replica.state
    fault = totals.fault(state.step, replica.plans.of(state.step).num_samples)
    if fault is not None:
        raise StepNotWhole(state.step, fault)
    if totals.facts.num_nonfinite:
        weights = not_finite(dict(state.model.named_parameters()))
        source = step_method(replica.task)
        raise NonFiniteLoss(
            state.step, totals.nonfinite_rank, totals.loss_sum, source, weights=weights
        )
    if not 0 < totals.weight < math.inf:
        raise BadTask(
            f"{step_method(replica.task)}: the weights of step {state.step + 1} add up to "
            f"{totals.weight}; "
            "a weight is how many samples or tokens loss_sum is a sum over"
        )


def commit(training: Training, totals: StepTotals) -> dict[str, float | None]:
    """Take the step: every rank the same, from the same gradients. No collective. Return the step's
    metrics.

    Raises NonFiniteLoss if the gradients are not finite and no loss scaler skips them.
    """
    replica = training.replica
    state, scaler, own = replica.state, replica.state.scaler, replica.own_updates
    replica.fingerprints.finish()
    measured = _finish_gradients(training, totals) if own is None else own.measured()
    task_state = replica.task_state.capture()
    if own is None:
        replica.learning_rates.check()
        replica.learning_rates.check_options()
    lr = set_rates(training) if own is None else own.lr
    values = {"lr": lr, **measured}
    if own is None or own.has_loss:
        values = {"loss": _finite(totals.loss_sum / totals.weight), **values}
    with state.committing():
        state.task = task_state
        replica.volatile.adopt()  # before hooks of the optimizer move what they move
        skipped = own is None and _update_weights(replica)
        if replica.after_step is not None and not skipped:
            replica.after_step(state, replica.volatile, replica.sampler.seed, replica.peers.device)
            state.task = replica.task_state.capture()
        if state.ema is not None and not skipped:
            state.ema.update(state.step + 1)
        if state.scheduler is not None:
            replica.learning_rates.tick()
        counted = cache(totals.counted)  # both enter it, in groups of steps
        state.ledger.commit(state.step, counted)
        state.chain.add(_link(replica, totals, counted))
    replica.learning_rates.check()
    replica.learning_rates.note_options()
    replica.steppers.look()
    if skipped:
        is_last = state.step == replica.last_step
        state.skipped.check(state.step, scaler, state.model.named_parameters(), last=is_last)
    if scaler.is_enabled():
        values["skipped_steps"] = state.skipped.total
    drop_gradients(state.optimizer, replica.idle_parameters)
    return values


def _link(replica: Replica, totals: StepTotals, counted: Callable[[], Count]) -> Link:
    """Return what the step that is being committed adds to the chain."""
    gradient, weights = replica.fingerprints.gradient, replica.fingerprints.weights
    record = {
        name: f"{value:016x}"
        for name, value in (("gradient", gradient), ("weights", weights))
        if value is not None
    }
    step = replica.state.step + 1
    return Link(step, gradient, totals.loss_sum, totals.weight, counted, record)


def set_rates(training: Training) -> float | None:
    """Set the learning rates of the present step, unless the task's scheduler has. Return that of
    the first group; None if its optimizer computes its own."""
    replica = training.replica
    state = replica.state
    if state.scheduler is not None:
        return replica.learning_rates.present()
    schedule = training.ctx.spec.schedule
    return replica.learning_rates.set(
        lr_factor(schedule, state.step, replica.total_steps, state.steps_per_epoch)
    )


def _finish_gradients(training: Training, totals: StepTotals) -> dict[str, float | None]:
    """Make the sums over ranks the gradients of the mean, and clip them. Return their norm as a
    metric if they are clipped."""
    replica = training.replica
    # The weights of this step's samples are known only now, for example of sequences of several
    # lengths.
    expected = totals.facts.num_samples * replica.weight_per_sample
    if totals.weight != expected:
        gradients = [
            parameter.grad for parameter in replica.parameters if parameter.grad is not None
        ]
        if gradients:
            torch._foreach_mul_(gradients, expected / totals.weight)
    optimizer = replica.state.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    replica.state.scaler.unscale_(optimizer)
    if training.grad_clip_norm is None:
        return {}
    return {"grad_norm": _finite(_clip(replica, training.grad_clip_norm))}


def _clip(replica: Replica, max_norm: float) -> float:
    """Clip the gradients and return their norm before that."""
    state = replica.state
    norm = float(torch.nn.utils.clip_grad_norm_(replica.parameters, max_norm))
    # A loss scaler skips such a step.
    if not math.isfinite(norm) and not state.scaler.is_enabled():
        raise NonFiniteLoss(
            state.step, None, norm, where(replica.task, "loss"), what="gradient norm"
        )
    return norm


def _update_weights(replica: Replica) -> bool:
    """Let the optimizer take its step. Return whether fp16's loss scaler skipped it."""
    scaler, state = replica.state.scaler, replica.state
    scale = scaler.get_scale() if scaler.is_enabled() else 1.0
    assert isinstance(state.optimizer, torch.optim.Optimizer)
    scaler.step(state.optimizer)
    scaler.update()
    return scaler.is_enabled() and state.skipped.note(scaler, scale)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
