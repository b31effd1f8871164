"""What happens between two epochs: the epoch's samples are accounted for, and the model is
evaluated."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from everstep.wire.events import EventKind
from everstep.wire.metric_names import lookup
from storage.checkpoints.lineage import best_of, is_better
from storage.errors import CorruptCheckpoint, StorageError, StorageNotFound
from train_fn.context import WorkerContext
from train_fn.errors import BadTask
from train_fn.loop.evaluate import evaluate
from train_fn.loop.replica import Replica
from train_fn.loop.reporter import Reporter
from train_fn.state.train_state import Best
from train_fn.tasks.checks import is_iterable, told

logger = logging.getLogger(__name__)


def require_best_metric(ctx: WorkerContext, replica: Replica) -> None:
    """Refuse at once what could only fail at the first evaluation. Raises BadTask."""
    held_out, checkpoint = replica.val_set, ctx.spec.checkpoint
    if checkpoint.best_metric is not None:
        logger.info(
            "the best checkpoint is that of the %simum of %s",
            checkpoint.best_mode,
            checkpoint.best_metric,
        )
    if checkpoint.best_metric is not None and (
        held_out is None or (not is_iterable(held_out) and len(held_out) == 0)
    ):
        raise BadTask(
            "checkpoint.best_metric is set, but the task holds nothing out to evaluate on; set it "
            "to null"
        )


def close_boundary(
    ctx: WorkerContext,
    replica: Replica,
    reporter: Reporter,
    keep: Callable[[], None] = lambda: None,
) -> bool:
    """Do what the present step calls for and the state does not yet have: after a resume, what was
    interrupted is done again.

    A collective. Returns whether the state was just found to be the best so far.

    Args:
        keep: called before code of the user's that may take the ranks along.
    """
    state = replica.state
    evaluates = evaluation_is_due(ctx, replica)
    rests = evaluates
    if state.closed_epochs < state.epoch:
        closed = state.ledger.close_epoch()
        seconds = reporter.seconds_of_epoch()
        rests = evaluates or _has_hook(replica)
        facts = {
            "epoch": state.closed_epochs,
            **closed,
            "seconds": round(seconds, 3),
            "rests": rests,
        }
        if state.scaler.is_enabled():
            facts["skipped_steps"] = state.skipped.total
        reporter.emit(EventKind.EPOCH_COMPLETED, facts)
        state.closed_epochs += 1
    if rests:
        keep()
    if not evaluates:
        return False
    reporter.hand_over()
    metrics = reporter.limited(evaluate(ctx, replica), ctx.spec.checkpoint.best_metric)
    state.metrics, state.evaluated_step = metrics, state.step
    if metrics:
        epoch = (state.step - 1) // state.steps_per_epoch
        facts = {
            "step": state.step,
            "epoch": epoch,
            "metrics": metrics,
            "rests": state.k == 0 and _has_hook(replica),
        }
        reporter.emit(EventKind.EVALUATED, facts)
    reporter.start_clock()
    return _is_best(ctx, replica, metrics)


def evaluation_is_due(ctx: WorkerContext, replica: Replica) -> bool:
    """Whether the present state is to be evaluated, and was not yet."""
    state = replica.state
    at_end = state.step == replica.total_steps
    at_epoch = (
        state.step > 0 and state.k == 0 and state.epoch % ctx.spec.train.eval_every_epochs == 0
    )
    return state.evaluated_step != state.step and (at_end or at_epoch)


@torch.no_grad()
def tell_epoch_ended(replica: Replica, reporter: Reporter) -> bool:
    """Call the task's ``on_epoch_end(model, epoch, metrics)`` on every rank; ``epoch`` counts from
    0. Whether it has one.

    A collective where the task has one: no rank begins the next step before all have returned, so
    that one that takes long is not taken for hung by those that wait for its gradients.
    """
    if not _has_hook(replica):
        return False
    began, epoch = time.monotonic(), replica.state.closed_epochs - 1
    reporter.hand_over()
    replica.task.on_epoch_end(replica.state.model, epoch, dict(replica.state.metrics))  # type: ignore[attr-defined]
    replica.trained.check(told(replica.task, "on_epoch_end"))
    replica.peers.gather(None)
    reporter.sign(
        EventKind.EPOCH_HOOK_DONE, {"epoch": epoch, "seconds": round(time.monotonic() - began, 3)}
    )
    reporter.start_clock()
    return True


def _has_hook(replica: Replica) -> bool:
    return getattr(replica.task, "on_epoch_end", None) is not None


def renew_best(ctx: WorkerContext, replica: Replica) -> bool:
    """At an attempt's beginning: see to it that the best state so far is one that is kept, since
    its rank may have died before its checkpoint was committed.

    A collective. Returns whether the present state is that one, and is to be saved. Where it is one
    that is lost, the best of those that are there takes its place.
    """
    best = replica.state.best
    if best is None or ctx.spec.checkpoint.best_metric is None:
        return False
    kept = replica.peers.share(_kept_best(ctx, best) if ctx.world_rank == 0 else None, 0)
    if kept != best and best.step == replica.state.step:
        replica.state.best = replace(best, checkpoint=str(ctx.checkpoint_name(best.step)))
        return True
    replica.state.best = kept
    return False


def _kept_best(ctx: WorkerContext, best: Best) -> Best | None:
    """``best`` where its checkpoint is there, or cannot be looked for; else the best that is."""
    store, spec = ctx.checkpoints, ctx.spec.checkpoint
    assert spec.best_metric is not None
    try:
        try:
            store.manifest(best.checkpoint)
            return best
        except (StorageNotFound, CorruptCheckpoint):
            found = best_of(store.lineage(), spec.best_metric, spec.best_mode)
    except StorageError as exc:
        logger.warning(
            "whether the best checkpoint %s is there is not known: %s", best.checkpoint, exc
        )
        return best
    value = None if found is None else lookup(found.metrics, spec.best_metric)
    return (
        None if found is None or value is None else Best(best.metric, value, found.step, found.name)
    )


def _is_best(ctx: WorkerContext, replica: Replica, metrics: dict[str, float]) -> bool:
    """Note the evaluation in the state if none was better. Raises BadTask where the metric that
    decides is not measured."""
    checkpoint, state = ctx.spec.checkpoint, replica.state
    if checkpoint.best_metric is None:
        return False
    name = (
        checkpoint.best_metric
        if checkpoint.best_metric in metrics
        else f"val_{checkpoint.best_metric}"
    )
    if name not in metrics:
        raise BadTask(
            f"checkpoint.best_metric {checkpoint.best_metric!r} is not measured; evaluation gives "
            f"{sorted(metrics)}"
        )
    value = metrics[name]
    if not is_better(value, state.best.value if state.best else None, checkpoint.best_mode):
        return False
    state.best = Best(name, value, state.step, str(ctx.checkpoint_name(state.step)))
    return True
