"""The commit of a step: a gate that only a whole step passes, then the update of the state."""

from __future__ import annotations

import math
from contextlib import ExitStack

import torch

from train_fn.checks.check import Moment
from train_fn.errors import BadTask, NonFiniteLoss
from train_fn.loop.build import Parts, optimizer_source
from train_fn.loop.sharded import rows_alone
from train_fn.loop.step import set_rates
from train_fn.loop.training import Training
from train_fn.samples.ledger import linked
from train_fn.samples.sampler import seed_micro_batch
from train_fn.state.optim import drop_gradients
from train_fn.state.sound_state import not_finite
from train_fn.step.fingerprints import local
from train_fn.step.report import StepTotals
from train_fn.tasks.protocol import step_method, where

_NO_BATCH, _UPDATE = -1, -2
"""Seed what after_step draws, and before it the optimizer. Micro-batches have numbers from 0 on."""


def require_whole(training: Training, totals: StepTotals) -> None:
    """Let a step pass only if all ranks and samples are in it and its loss is finite. All ranks
    decide alike, by the same totals.

    Raises:
        StepNotWhole: ranks or samples are missing.
        NonFiniteLoss: the loss of a rank is NaN or infinite.
        BadTask: the weights that the task's loss returned do not add up to a positive number.
    """
    state, task = training.replica.state, training.replica.parts.task
    num_samples = training.plans.of(state.step).num_samples
    training.session.agree(state.step, totals.fault(state.step, num_samples))
    if totals.facts.num_nonfinite:
        weights = not_finite(dict(state.model.named_parameters()))
        source = step_method(task)
        raise NonFiniteLoss(
            state.step, totals.nonfinite_rank, totals.loss_sum, source, weights=weights
        )
    if not 0 < totals.weight < math.inf:
        raise BadTask(
            f"{step_method(task)}: the weights of step {state.step + 1} add up to "
            f"{totals.weight}; "
            "a weight is how many samples or tokens loss_sum is a sum over"
        )


def commit(training: Training, totals: StepTotals) -> dict[str, float | None]:
    """Take the step: every rank the same, from the same gradients. No collective. Return the step's
    metrics.

    Raises NonFiniteLoss if the gradients are not finite and no loss scaler skips them.
    """
    replica, rates = training.replica, training.rates
    parts, own, fingerprints = replica.parts, replica.own, replica.together.fingerprints
    state, scaler, moving = parts.state, parts.state.scaler, replica.passes.moving
    fingerprints.finish()
    measured = _finish_gradients(training, totals) if own is None else own.measured()
    task_state = parts.task_state.capture()
    if own is None:
        rates.check()
        rates.check_options()
    lr = set_rates(rates, training.ctx.spec.schedule, parts) if own is None else own.lr
    values = {"lr": lr, **measured}
    if own is None or own.has_loss:
        values = {"loss": _finite(totals.loss_sum / totals.weight), **values}
    with training.session.commit():
        state.task = task_state
        moving.adopt()  # before hooks of the optimizer move what they move
        if own is None:
            seed_micro_batch(parts.sampler.seed, state.step, _UPDATE, training.ctx.device)
        skipped = own is None and _update_weights(parts)
        if hasattr(parts.task, "after_step") and not skipped:
            _call_after_step(training)
            state.task = parts.task_state.capture()
        if state.ema is not None and not skipped:
            state.ema.update(state.step + 1)
        if state.scheduler is not None:
            rates.tick()
        count, gradient = totals.counted(), fingerprints.gradient
        state.chain = linked(
            state.chain, state.step + 1, gradient, totals.loss_sum, totals.weight, count
        )
        state.count_step(count)
    rates.check()
    rates.note_options()
    if skipped:
        is_last = state.step == parts.last_step
        state.skipped.check(state.step, scaler, state.model.named_parameters(), last=is_last)
    if scaler.is_enabled():
        values["skipped_steps"] = state.skipped.total
    drop_gradients(state.optimizer, parts.trained.idle)
    return values


@torch.no_grad()
def _call_after_step(training: Training) -> None:
    """Let the task's hook change the model. It is part of the commit, so no rank may wait for
    others in it. What it draws is the same on all ranks, and in all attempts."""
    replica, task = training.replica, training.replica.parts.task
    state = replica.state
    with replica.checks.around(Moment.AFTER_STEP, where(task, "after_step")):
        seed_micro_batch(replica.parts.sampler.seed, state.step, _NO_BATCH, training.ctx.device)
        task.after_step(state.model, state.step)  # type: ignore[attr-defined]
        replica.passes.moving.rebase()


def proof_of(training: Training) -> dict[str, str]:
    """Return the digests of the step that was committed."""
    fingerprints = training.replica.together.fingerprints
    digests = (("gradient", fingerprints.gradient), ("weights", fingerprints.weights))
    found = {name: f"{value:016x}" for name, value in digests if value is not None}
    return {**found, "chain": training.replica.state.chain}


def _finish_gradients(training: Training, totals: StepTotals) -> dict[str, float | None]:
    """Make the sums over ranks the gradients of the mean, and clip them. Return their norm as a
    metric if they are clipped."""
    parts = training.replica.parts
    state, max_norm = parts.state, training.ctx.spec.train.grad_clip_norm
    # The weights of this step's samples are known only now, for example of sequences of several
    # lengths.
    expected = totals.facts.num_samples * training.replica.passes.weight_per_sample
    factor = 1.0
    if totals.weight != expected:
        factor = expected / totals.weight
        gradients = [local(each.grad) for each in parts.trained.parameters if each.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)
    assert isinstance(state.optimizer, torch.optim.Optimizer)
    state.scaler.unscale_(state.optimizer)
    if max_norm is None:
        return {}
    norm = training.exchange.clip(max_norm, factor)
    # A loss scaler skips such a step.
    if not math.isfinite(norm) and not state.scaler.is_enabled():
        raise NonFiniteLoss(state.step, None, norm, where(parts.task, "loss"), what="gradient norm")
    return {"grad_norm": _finite(norm)}


def _update_weights(parts: Parts) -> bool:
    """Let the optimizer take its step. Return whether fp16's loss scaler skipped it."""
    scaler, state = parts.state.scaler, parts.state
    scale = scaler.get_scale() if scaler.is_enabled() else 1.0
    assert isinstance(state.optimizer, torch.optim.Optimizer)
    with ExitStack() as stack:
        if state.shards is not None:
            stack.enter_context(state.shards.updating(state.optimizer))
        if state.step == state.begun_at:
            stack.enter_context(rows_alone(state.gathered, optimizer_source(parts.task)))
        scaler.step(state.optimizer)
    scaler.update()
    return scaler.is_enabled() and state.skipped.note(scaler, scale)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
