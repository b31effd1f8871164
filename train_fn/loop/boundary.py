"""What happens between two steps where an epoch ends: its samples are accounted for, the model is
evaluated, and the task's hook runs."""

from __future__ import annotations

import logging
import time

import torch

from everstep.wire.events import EventKind
from train_fn.context import WorkerContext
from train_fn.loop.best import note_best
from train_fn.loop.built_alike import require_same_weights
from train_fn.loop.evaluate import evaluate, evaluation_is_due
from train_fn.loop.replica import Replica
from train_fn.loop.reporter import Reporter
from train_fn.loop.training import Training
from train_fn.state.digest import tree_digest
from train_fn.tasks.checks import where

logger = logging.getLogger(__name__)


def close_boundary(training: Training, *, is_new: bool = True) -> bool:
    """Close the epoch and evaluate the model if the present step calls for it and the state does
    not have it yet. After a resume, this finishes what was interrupted. A collective.

    Return whether the present state was just found to be the best so far.

    Args:
        is_new: whether a step made this state. It is then published before code of the user runs,
            which may end all ranks at once. A restored state is on a node already.
    """
    ctx, replica, reporter = training.ctx, training.replica, training.reporter
    state, training.progress.phase = replica.state, "evaluation"
    evaluates, closes = evaluation_is_due(ctx, replica), state.closed_epochs < state.epoch
    if closes:
        _close_epoch(replica, reporter, evaluates)
    if is_new and (evaluates or (closes and _has_hook(replica))):
        training.publisher.keep()
    is_best = evaluates and _evaluate(ctx, replica, reporter)
    rested = state.evaluated_step == state.step
    # Where an attempt begins with an evaluation, the one before it had closed the epoch, and was
    # interrupted before the hook.
    if closes or (evaluates and state.k == 0):
        rested = _call_hook(replica, reporter) or rested
        replica.volatile.renew()
        _renew_task_state(replica)
    if rested:
        training.clock.restart()
    return is_best


def _close_epoch(replica: Replica, reporter: Reporter, evaluates: bool) -> None:
    """Count the epoch's samples and report it."""
    state = replica.state
    closed = state.ledger.close_epoch()
    seconds = reporter.seconds_of_epoch()
    facts = {
        "epoch": state.closed_epochs,
        **closed,
        "seconds": round(seconds, 3),
        "rests": evaluates or _has_hook(replica),
    }
    if state.scaler.is_enabled():
        facts["skipped_steps"] = state.skipped.total
    reporter.emit(EventKind.EPOCH_COMPLETED, facts)
    state.closed_epochs += 1


def _evaluate(ctx: WorkerContext, replica: Replica, reporter: Reporter) -> bool:
    """Evaluate the present state and report its metrics. Return whether it is the best so far."""
    state = replica.state
    reporter.hand_over()
    metrics = reporter.limited(evaluate(ctx, replica), ctx.spec.checkpoint.best_metric)
    state.metrics, state.evaluated_step = metrics, state.step
    if metrics:
        facts = {
            "step": state.step,
            "epoch": (state.step - 1) // state.steps_per_epoch,
            "metrics": metrics,
            "rests": state.k == 0 and _has_hook(replica),
        }
        reporter.emit(EventKind.EVALUATED, facts)
    reporter.start_clock()
    return note_best(ctx, replica, metrics)


@torch.no_grad()
def _call_hook(replica: Replica, reporter: Reporter) -> bool:
    """Call the task's ``on_epoch_end(model, epoch, metrics)``; ``epoch`` counts from 0. Return
    whether the task has one.

    A collective if it has one: no rank begins the next step before the hook has returned on all of
    them. So a rank whose hook takes long is not taken for a hung one by peers that wait for its
    gradients.
    """
    if not _has_hook(replica):
        return False
    began, epoch = time.monotonic(), replica.state.closed_epochs - 1
    reporter.hand_over()
    replica.in_hook = True
    replica.task.on_epoch_end(replica.state.model, epoch, dict(replica.state.metrics))  # type: ignore[attr-defined]
    replica.trained.check(where(replica.task, "on_epoch_end"))
    replica.learning_rates.note_options()
    require_same_weights(replica, where(replica.task, "on_epoch_end"))
    replica.in_hook = False
    reporter.sign(
        EventKind.EPOCH_HOOK_DONE, {"epoch": epoch, "seconds": round(time.monotonic() - began, 3)}
    )
    reporter.start_clock()
    return True


def _has_hook(replica: Replica) -> bool:
    return getattr(replica.task, "on_epoch_end", None) is not None


def _renew_task_state(replica: Replica) -> None:
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
