"""The commit of a step: a gate that only a whole step passes, then the update of the state. Once
an epoch the changes of a task's hook enter it too.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache

import torch

from everstep.wire.events import EventKind
from train_fn.checks.check import Moment
from train_fn.errors import BadTask, NonFiniteLoss
from train_fn.loop.build import optimizer_source
from train_fn.loop.replica import Replica
from train_fn.loop.sharded import rows_alone
from train_fn.loop.step import set_rates
from train_fn.loop.training import Training
from train_fn.samples.ledger import Count, Link
from train_fn.samples.sampler import seed_micro_batch
from train_fn.session.report import Reporter
from train_fn.state.optim import drop_gradients
from train_fn.state.sound_state import not_finite
from train_fn.state.tensor_tree import tree_digest
from train_fn.step.fingerprints import local
from train_fn.step.report import StepTotals
from train_fn.tasks.protocol import step_method, where

_NO_BATCH = -1
"""Seeds what after_step draws. Micro-batches have numbers from 0 on."""


def require_whole(training: Training, totals: StepTotals) -> None:
    """Let a step pass only if all ranks and samples are in it and its loss is finite. All ranks
    decide alike, by the same totals.

    Raises:
        StepNotWhole: ranks or samples are missing.
        NonFiniteLoss: the loss of a rank is NaN or infinite.
        BadTask: the weights that the task's loss returned do not add up to a positive number.
    """
    replica = training.replica
    state = replica.state
    num_samples = replica.plans.of(state.step).num_samples
    training.session.agree(state.step, totals.fault(state.step, num_samples))
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
    lr = set_rates(replica, training.ctx.spec.schedule) if own is None else own.lr
    values = {"lr": lr, **measured}
    if own is None or own.has_loss:
        values = {"loss": _finite(totals.loss_sum / totals.weight), **values}
    with training.session.commit():
        state.task = task_state
        replica.moving.adopt()  # before hooks of the optimizer move what they move
        skipped = own is None and _update_weights(replica)
        if replica.after_step is not None and not skipped:
            _call_after_step(replica, replica.after_step)
            state.task = replica.task_state.capture()
        if state.ema is not None and not skipped:
            state.ema.update(state.step + 1)
        if state.scheduler is not None:
            replica.learning_rates.tick()
        counted = cache(totals.counted)  # both enter it, in groups of steps
        state.ledger.commit(state.step, counted)
        state.chain.add(_link(replica, totals, counted))
        state.step += 1
    replica.learning_rates.check()
    replica.learning_rates.note_options()
    if skipped:
        is_last = state.step == replica.last_step
        state.skipped.check(state.step, scaler, state.model.named_parameters(), last=is_last)
    if scaler.is_enabled():
        values["skipped_steps"] = state.skipped.total
    drop_gradients(state.optimizer, replica.idle_parameters)
    return values


@torch.no_grad()
def _call_after_step(replica: Replica, source: str) -> None:
    """Let the task's hook change the model. It is part of the commit, so no rank may wait for
    others in it. What it draws is the same on all ranks, and in all attempts."""
    state = replica.state
    with replica.checks.around(Moment.AFTER_STEP, source):
        seed_micro_batch(replica.sampler.seed, state.step, _NO_BATCH, replica.peers.device)
        replica.task.after_step(state.model, state.step)  # type: ignore[attr-defined]
        replica.moving.rebase()


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


def _finish_gradients(training: Training, totals: StepTotals) -> dict[str, float | None]:
    """Make the sums over ranks the gradients of the mean, and clip them. Return their norm as a
    metric if they are clipped."""
    replica = training.replica
    # The weights of this step's samples are known only now, for example of sequences of several
    # lengths.
    expected = totals.facts.num_samples * replica.weight_per_sample
    factor = 1.0
    if totals.weight != expected:
        factor = expected / totals.weight
        gradients = [
            local(parameter.grad) for parameter in replica.parameters if parameter.grad is not None
        ]
        if gradients:
            torch._foreach_mul_(gradients, factor)
    optimizer = replica.state.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    replica.state.scaler.unscale_(optimizer)
    if training.grad_clip_norm is None:
        return {}
    norm = training.exchange.clip(training.grad_clip_norm, factor)
    state = replica.state
    # A loss scaler skips such a step.
    if not math.isfinite(norm) and not state.scaler.is_enabled():
        raise NonFiniteLoss(
            state.step, None, norm, where(replica.task, "loss"), what="gradient norm"
        )
    return {"grad_norm": _finite(norm)}


def _update_weights(replica: Replica) -> bool:
    """Let the optimizer take its step. Return whether fp16's loss scaler skipped it."""
    scaler, state = replica.state.scaler, replica.state
    scale = scaler.get_scale() if scaler.is_enabled() else 1.0
    assert isinstance(state.optimizer, torch.optim.Optimizer)
    is_first = replica.together.begun_at == state.step
    with ExitStack() as stack:
        if state.shards is not None:
            stack.enter_context(state.shards.updating(state.optimizer))
        if is_first:
            stack.enter_context(rows_alone(replica.shards, optimizer_source(replica.task)))
        scaler.step(state.optimizer)
    scaler.update()
    return scaler.is_enabled() and state.skipped.note(scaler, scale)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---------------------------------------------------------------- epoch hook

# A task's ``on_epoch_end``, whose changes enter the state once an epoch, whatever breaks.
#
# The state says whether the hook has still to run. If the attempt breaks in a hook that has changed
# the model by then, the rank leaves no state: it would hold a part of the changes. Rank 0 published
# the state from before.

logger = logging.getLogger(__name__)

TORN = "the task's on_epoch_end had changed a part of the state"
"""Why a rank leaves no state, if its attempt broke in the hook."""


def has_hook(replica: Replica) -> bool:
    return getattr(replica.task, "on_epoch_end", None) is not None


@torch.no_grad()
def call_hook(replica: Replica, reporter: Reporter) -> None:
    """Call the task's ``on_epoch_end(model, epoch, metrics)``; ``epoch`` counts from 0.

    A collective: no rank begins the next step before the hook has returned on all of them. So a
    rank whose hook takes long is not taken for a hung one by peers that wait for its gradients.
    """
    began, epoch = time.monotonic(), replica.state.closed_epochs - 1
    reporter.hand_over()
    replica.before_hook = _reach(replica) if replica.state.piece is None else None
    source = where(replica.task, "on_epoch_end")
    is_watched = rows_alone(replica.shards, source, replica.order)
    with replica.checks.around(Moment.EPOCH_HOOK, source), is_watched:
        replica.task.on_epoch_end(replica.state.model, epoch, dict(replica.state.metrics))  # type: ignore[attr-defined]
    replica.learning_rates.note_options()
    reporter.sign(
        EventKind.EPOCH_HOOK_DONE, {"epoch": epoch, "seconds": round(time.monotonic() - began, 3)}
    )
    reporter.start_clock()


def is_torn(replica: Replica) -> bool:
    """Return whether a hook that has not ended yet has changed the state."""
    return replica.before_hook is not None and replica.before_hook != _reach(replica)


def renew_task_state(replica: Replica) -> None:
    """Save the task's state again, since ``on_epoch_end`` may have changed it, and compare it
    between ranks. A collective."""
    if not replica.task_state:
        return
    replica.state.task = replica.task_state.capture()
    digests = replica.peers.gather(tree_digest(replica.state.task))
    if len(set(digests)) > 1:
        logger.warning(
            "state_dict() of the task differs between ranks; after a restart all ranks have that "
            "of one rank. Compute it from what is the same on all ranks"
        )


def _reach(replica: Replica) -> str:
    """Return a digest of what a hook may change: the model, its modes, the optimizer's options."""
    state = replica.state
    options = [
        {name: value for name, value in group.items() if name != "params"}
        for group in state.optimizer.param_groups
    ]
    modes = [module.training for module in state.model.modules()]
    return tree_digest([dict(state.model.state_dict()), state.unsaved(), modes, options])
