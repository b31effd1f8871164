"""What an attempt does between the restored state and its first step."""

from __future__ import annotations

from everstep.wire.events import EventKind
from train_fn.loop.best import renew_best
from train_fn.loop.boundary import close_boundary
from train_fn.loop.claim import claim
from train_fn.loop.evaluate import evaluation_is_due
from train_fn.loop.training import Training
from train_fn.snapshots.publisher import snapshots_of
from train_fn.step.determinism import reproducibility
from train_fn.step.nccl import group_backend


def begin(training: Training) -> bool:
    """Save what cannot wait, claim the run, and finish what the last attempt left undone at this
    step. A collective.

    Return whether the present state is the best so far.
    """
    ctx, replica = training.ctx, training.replica
    saver, reporter = training.saver, training.reporter
    # After its first save a fork no longer depends on the run that it comes from. A fork that is
    # evaluated now is saved afterwards, with its metrics.
    is_unsaved_fork = training.restored.origin is not None
    if is_unsaved_fork:
        if not evaluation_is_due(ctx, replica):
            saver.offer(due=True, is_best=True)
            is_unsaved_fork = False
    elif renew_best(ctx, replica):
        saver.offer(due=False, is_best=True)
    reporter.report_again()
    if ctx.world_rank == 0:
        claim(ctx)
        ctx.journal.emit(EventKind.TRAINING_STARTED, _facts(training))
    is_best = close_boundary(training, is_new=False)
    if (is_best or is_unsaved_fork) and replica.state.step < replica.last_step:
        saver.offer(due=is_unsaved_fork, is_best=True)
    reporter.start_clock()
    return is_best


def _facts(training: Training) -> dict[str, object]:
    """Return the data of the ``training_started`` event."""
    ctx, replica = training.ctx, training.replica
    is_first = replica.state.step == 0 or ctx.attempt == 1
    return {
        "total_steps": replica.last_step,
        "steps_per_epoch": replica.sampler.steps_per_epoch,
        "num_samples": replica.sampler.num_samples,
        "num_parameters": sum(parameter.numel() for parameter in replica.state.model.parameters()),
        "micro_batch_size": replica.sampler.micro_batch_size,
        # before the attempt's first step
        "rests": evaluation_is_due(ctx, replica) or replica.state.hook_due,
        "guarantee": replica.train_set.guarantee() if is_first else None,
        "snapshots": snapshots_of(ctx),
        "warnings": list(replica.warnings),
        "device": str(ctx.device),
        "backend": group_backend(ctx.device),
        "reproducible": reproducibility(ctx.spec.train.exactness, compiled=ctx.spec.train.compile),
    }
