"""How a rank leaves an attempt that broke: it lets its peers go, and keeps its state."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from train_fn.checkpoints.saver import STOP_PATIENCE_S, Saver
from train_fn.checkpoints.state_copy import BoundaryCopies
from train_fn.context import WorkerContext
from train_fn.errors import Miscomputed, PeerApart, RanksApart, TrainError, forget_frames
from train_fn.loop.replica import Replica
from train_fn.loop.training import Progress
from train_fn.node.gpu_memory import memory_summary
from train_fn.recovery.rank_error import StepFailed, describe_error
from train_fn.snapshots.last_save import newest_durable
from train_fn.snapshots.leaving import leave_snapshot
from train_fn.state.kept_state import KeptState
from train_fn.step.nccl import fails_by_itself
from train_fn.step.peers import end_process_group

BETWEEN_STATES = "the rank was between two states"
"""Why a rank leaves no state, if it failed while it changed it."""

logger = logging.getLogger(__name__)


def leave(ctx: WorkerContext, progress: Progress, cause: BaseException) -> StepFailed:
    """Let the peers go, leave the state of the last committed step on this node, and return what
    happened.

    Peers first: only the neighbours of a dead rank notice its death by themselves, and each rank
    frees the next one by leaving. Nobody should wait until others have written their state.
    Where leaving frees nobody, the state comes first: an abort may take long.
    """
    kept_step = progress.rescue.leave() if progress.rescue is not None else None
    frees_peers = fails_by_itself()
    error = describe_error(cause, ctx.world_rank)
    distrusted = _why_distrusted(ctx, cause)
    memory = memory_summary(cause, ctx.device)
    forget_frames(cause)
    replica, training = progress.replica, progress.training
    if training is not None:
        training.saver.close()
    if replica is not None:
        replica.wrapped = None
    gc.collect()
    if frees_peers:
        end_process_group()
    if training is not None:
        training.loader.close()  # its processes may take a moment to end
        training.publisher.close()
    problem: str | None = "the rank had no state yet"
    step = None
    if replica is not None:
        step = replica.state.step if progress.is_restored or replica.state.complete else None
        problem = distrusted or keep_state(ctx, replica.state, partial(_last_committed, replica))
        if problem is not None and distrusted is None and kept_step is not None:
            step, problem = kept_step, None  # a device that fails now was read before
    if not frees_peers:
        end_process_group()
    if training is not None:
        training.profiler.give_up()
        training.reporter.close()
    progress.replica = progress.training = None
    error = dataclasses.replace(
        error,
        step=step,
        phase=progress.phase,
        snapshot_step=step if problem is None else None,
        memory=memory,
    )
    return StepFailed(error, problem)


def _why_distrusted(ctx: WorkerContext, cause: BaseException) -> str | None:
    """Return why this rank's state is not kept, if that follows from what broke the attempt."""
    if isinstance(cause, RanksApart | PeerApart):
        return "ranks went apart, so the state may hold wrong bits"
    named = cause.ranks if isinstance(cause, Miscomputed) else ()
    if ctx.world_rank in named and len(named) < ctx.world_size:
        return "this rank computes wrongly; the others keep the same state"
    return None


def keep_state(
    ctx: WorkerContext, state: KeptState, whole: Callable[[], dict[str, Any] | str]
) -> str | None:
    """Leave the state of the last committed step as a snapshot. Return why that cannot be done, or
    None.

    Args:
        whole: returns that state, or why there is none.
    """
    try:
        found = whole()
        if isinstance(found, str):
            return found
        state.require_sound(found)
        return leave_snapshot(ctx, found)
    except TrainError as exc:  # what broke the attempt says more
        return str(exc)
    except RuntimeError as exc:  # so does a device that cannot be read any more
        logger.warning("the state of step %d cannot be read: %s", state.step, exc)
        return f"the state cannot be read from {ctx.device}: {exc}"


def _last_committed(replica: Replica) -> dict[str, Any] | str:
    """Return the state of the last committed step, or why there is none."""
    if not replica.state.complete:
        own = replica.own_updates
        return BETWEEN_STATES if own is None else own.shadow.newest or BETWEEN_STATES
    if torn := replica.volatile.put_back():
        return not_copied(torn)
    return replica.state.state_dict()


def not_copied(torn: list[str]) -> str:
    """Return why a state is torn in which the failed step changed these tensors."""
    return (
        f"the failed step changed {', '.join(torn)}, and no copy was kept of what was there before"
    )


def save_last(ctx: WorkerContext, progress: Progress) -> bool:
    """Commit the state of the last committed step as a checkpoint, after an error of a rank that is
    alone. Raises nothing. Return whether a checkpoint holds that state now."""
    replica, training = progress.replica, progress.training
    if replica is None:
        return False
    state, own = replica.state, replica.own_updates
    if not state.complete and own is not None and own.shadow.newest is not None:
        state.load_state_dict(own.shadow.newest)
    if not state.complete:
        return False
    replica.volatile.put_back()
    try:
        if newest_durable(ctx.run_dir) < state.step:
            saver = training.saver if training else Saver(ctx, state, BoundaryCopies(state))
            saver.save_now(patience_s=STOP_PATIENCE_S)
    except Exception as exc:  # what broke the attempt says more
        logger.warning(
            "the state of step %d could not be saved as a checkpoint: %s", state.step, exc
        )
        return False
    return True
