"""What happens between two steps where an epoch ends: its samples are accounted for, the model is
evaluated, and the task's hook runs."""

from __future__ import annotations

from everstep.wire.events import EventKind
from train_fn.context import WorkerContext
from train_fn.loop.best import note_best
from train_fn.loop.epoch_hook import call_hook, has_hook, renew_task_state
from train_fn.loop.evaluate import evaluate, evaluation_is_due
from train_fn.loop.replica import Replica
from train_fn.loop.reporter import Reporter
from train_fn.loop.training import Training


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
    if is_new and (evaluates or state.hook_due):
        training.publisher.keep()
    is_best = evaluates and _evaluate(ctx, replica, reporter)
    calls = state.hook_due and has_hook(replica)  # a fork may have another task
    rested = state.evaluated_step == state.step or calls
    if calls:
        call_hook(replica, reporter)
    if closes or calls or (evaluates and state.k == 0):
        replica.volatile.renew()
        renew_task_state(replica)
    state.hook_due, replica.before_hook = False, None
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
        "rests": evaluates or has_hook(replica),
    }
    if state.scaler.is_enabled():
        facts["skipped_steps"] = state.skipped.total
    reporter.emit(EventKind.EPOCH_COMPLETED, facts)
    state.closed_epochs += 1
    state.hook_due = has_hook(replica)


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
            "rests": state.hook_due,
        }
        reporter.emit(EventKind.EVALUATED, facts)
    reporter.start_clock()
    return note_best(ctx, replica, metrics)
