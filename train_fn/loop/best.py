"""The best checkpoint so far, by the metric that the spec names."""

from __future__ import annotations

import logging
from dataclasses import replace

from everstep.wire.metric_names import lookup
from storage.checkpoints.lineage import best_of, is_better
from storage.errors import CorruptCheckpoint, StorageError, StorageNotFound
from train_fn.context import WorkerContext
from train_fn.errors import BadTask
from train_fn.loop.replica import Replica
from train_fn.state.train_state import Best
from train_fn.tasks.checks import is_iterable
from train_fn.tasks.options import require_measured

logger = logging.getLogger(__name__)


def require_best_metric(ctx: WorkerContext, replica: Replica) -> None:
    """Check before training that the best metric can be measured. Raises BadTask."""
    held_out, checkpoint = replica.val_set, ctx.spec.checkpoint
    if checkpoint.best_metric is None:
        return
    logger.info(
        "the best checkpoint is the one with the %simum of %s",
        checkpoint.best_mode,
        checkpoint.best_metric,
    )
    if held_out is None or (not is_iterable(held_out) and len(held_out) == 0):
        raise BadTask(
            "checkpoint.best_metric is set, but the task holds nothing out to evaluate on; set it "
            "to null"
        )
    require_measured(replica.task, checkpoint.best_metric)


def note_best(ctx: WorkerContext, replica: Replica, metrics: dict[str, float]) -> bool:
    """Record the present state as the best one if no evaluation was better. Return whether it is.

    Raises BadTask if ``metrics`` lacks the metric that decides.
    """
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


def renew_best(ctx: WorkerContext, replica: Replica) -> bool:
    """Make sure, when an attempt begins, that the best state so far has a checkpoint.

    A rank may have died before it committed that checkpoint. If the present state is the best one,
    the caller saves it. If the best one is lost, the best checkpoint that exists takes its place.

    A collective. Return whether the present state is the best one and must be saved.
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
    """Return ``best`` if its checkpoint exists or the storage does not answer, else the best
    checkpoint that exists."""
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
            "cannot read whether the best checkpoint %s still exists, so it is assumed to: %s",
            best.checkpoint,
            exc,
        )
        return best
    value = None if found is None else lookup(found.metrics, spec.best_metric)
    return (
        None if found is None or value is None else Best(best.metric, value, found.step, found.name)
    )
