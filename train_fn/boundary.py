"""What happens between two epochs: the epoch's samples are accounted for, and the model is evaluated."""

from __future__ import annotations

import torch

from everstep.events import EventKind
from storage.run_dir import CheckpointName
from train_fn.context import WorkerContext
from train_fn.errors import BadTask
from train_fn.evaluate import evaluate
from train_fn.replica import Replica
from train_fn.reporter import Reporter
from train_fn.state import Best
from train_fn.tasks.checks import is_iterable


def require_best_metric(ctx: WorkerContext, replica: Replica) -> None:
    """Refuse at once what could only fail at the first evaluation. Raises BadTask."""
    held_out = replica.val_set
    if ctx.spec.checkpoint.best_metric is not None and (held_out is None or (not is_iterable(held_out) and len(held_out) == 0)):
        raise BadTask("checkpoint.best_metric is set, but the task holds nothing out to evaluate on; set it to null")


def close_boundary(ctx: WorkerContext, replica: Replica, reporter: Reporter) -> bool:
    """Do what the present step calls for and the state does not yet have: after a resume, what was interrupted is done again.

    A collective. Returns whether the state was just found to be the best so far.
    """
    state = replica.state
    at_end = state.step == replica.total_steps
    at_epoch = state.step > 0 and state.k == 0 and state.epoch % ctx.spec.train.eval_every_epochs == 0
    evaluates = state.evaluated_step != state.step and (at_end or at_epoch)
    if state.closed_epochs < state.epoch:
        closed = state.ledger.close_epoch()
        seconds = reporter.seconds_of_epoch()
        rests = evaluates or hasattr(replica.task, "on_epoch_end")
        facts = {"epoch": state.closed_epochs, **closed, "seconds": round(seconds, 3), "rests": rests}
        reporter.emit(EventKind.EPOCH_COMPLETED, facts)
        state.closed_epochs += 1
    if not evaluates:
        return False
    reporter.hand_over()
    metrics = evaluate(ctx, replica)
    state.metrics, state.evaluated_step = metrics, state.step
    if metrics:
        epoch = (state.step - 1) // state.steps_per_epoch
        reporter.emit(EventKind.EVALUATED, {"step": state.step, "epoch": epoch, "metrics": metrics})
    reporter.start_clock()
    return _is_best(ctx, replica, metrics)


@torch.no_grad()
def tell_epoch_ended(replica: Replica) -> None:
    """Call the task's ``on_epoch_end(model, epoch, metrics)``, where it has one, on every rank; ``epoch`` counts from 0."""
    hook = getattr(replica.task, "on_epoch_end", None)
    if hook is not None:
        hook(replica.state.model, replica.state.closed_epochs - 1, dict(replica.state.metrics))


def _is_best(ctx: WorkerContext, replica: Replica, metrics: dict[str, float]) -> bool:
    """Note the evaluation in the state if none was better. Raises BadTask where the metric that decides is not measured."""
    checkpoint, state = ctx.spec.checkpoint, replica.state
    if checkpoint.best_metric is None:
        return False
    name = checkpoint.best_metric if checkpoint.best_metric in metrics else f"val_{checkpoint.best_metric}"
    if name not in metrics:
        raise BadTask(f"checkpoint.best_metric {checkpoint.best_metric!r} is not measured; evaluation gives {sorted(metrics)}")
    value = metrics[name]
    sign = 1 if checkpoint.best_mode == "max" else -1
    if value != value or (state.best is not None and sign * value <= sign * state.best.value):
        return False
    state.best = Best(name, value, state.step, str(CheckpointName(state.step, ctx.submission)))
    return True
