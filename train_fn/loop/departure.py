"""How a rank leaves an attempt that broke: it lets its peers go, and keeps its state."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from train_fn.checkpoints.save_slot import BoundaryCopies
from train_fn.checkpoints.saver import STOP_PATIENCE_S, Saver
from train_fn.context import WorkerContext
from train_fn.errors import (
    Miscomputed,
    PeerApart,
    PeerMiscomputed,
    RanksApart,
    Replaced,
    TrainError,
    forget_frames,
)
from train_fn.loop import survivor
from train_fn.loop.commit import TORN, is_torn
from train_fn.loop.replica import Replica
from train_fn.loop.survivor import may_serve_again
from train_fn.loop.training import RankProgress
from train_fn.node.device import keep_if_broken
from train_fn.node.memory import memory_summary
from train_fn.recovery.evidence import StepFailed, describe_error
from train_fn.snapshots.election import newest_durable
from train_fn.snapshots.publisher import leave_snapshot
from train_fn.snapshots.store import kept_step as kept_step_here
from train_fn.state.kept_state import KeptState
from train_fn.step.nccl import fails_by_itself
from train_fn.step.peers import end_process_group

BETWEEN_STATES = "the rank was between two states"
"""Why a rank leaves no state, if it failed while it changed it."""

_LEAVING = (Replaced, PeerApart, PeerMiscomputed)
"""Errors after which a rank keeps nothing in its process, though others caused them."""

logger = logging.getLogger(__name__)


def leave(ctx: WorkerContext, progress: RankProgress, cause: BaseException) -> StepFailed:
    """Let the peers go, leave the state of the last committed step on this node, and return what
    happened.

    Peers first: only the neighbours of a dead rank notice its death by themselves, and each rank
    frees the next one by leaving. Nobody should wait until others have written their state.
    Where leaving frees nobody, the state comes first: an abort may take long.

    A rank that merely lost a peer writes no state if its process may serve the next attempt: it
    keeps the state where it is (``survivor``).
    """
    kept_step = progress.rescue.leave() if progress.rescue is not None else None
    frees_peers = fails_by_itself()
    error = describe_error(cause, ctx.world_rank)
    distrusted = _why_distrusted(ctx, cause)
    may_stay = ctx.in_process and error.collateral and not isinstance(cause, _LEAVING)
    memory = memory_summary(cause, ctx.device)
    replica, training = progress.replica, progress.training
    broken = keep_if_broken(ctx.device, cause, replica, training)
    if not broken:
        forget_frames(cause)
    if training is not None:
        training.saver.close()
        training.clock.close()
    if replica is not None and not broken:
        replica.let_go()
    gc.collect()
    if frees_peers:
        end_process_group()
    if training is not None:
        training.loader.close()  # its processes may take a moment to end
        training.publisher.close()
    step, problem = _leave_state(ctx, progress, distrusted=distrusted, may_stay=may_stay)
    stays_at = kept_step_here()
    if problem is not None and distrusted is None and kept_step is not None:
        step, problem = kept_step, None  # a device that fails now was read before
    if not frees_peers:
        end_process_group()
    if training is not None:
        training.profiler.give_up()
        training.reporter.close()
    progress.replica = progress.training = progress.survivor = None
    error = dataclasses.replace(
        error,
        step=step,
        phase=progress.phase,
        snapshot_step=step if problem is None and stays_at is None else None,
        stays_at=stays_at,
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


def _leave_state(
    ctx: WorkerContext, progress: RankProgress, *, distrusted: str | None, may_stay: bool
) -> tuple[int | None, str | None]:
    """Leave the state of the last committed step, or keep it in this process if it ``may_stay``.

    Args:
        distrusted: why the state must not be used, if it must not.

    Return its step, and why neither can be done.
    """
    replica, taken = progress.replica, progress.survivor
    made_by = ctx if taken is None else taken.ctx
    if replica is None:
        if taken is None:
            return None, "the rank had no state yet"
        return taken.step, taken.leave()
    state = replica.state
    step = state.step if progress.is_restored or state.complete else None
    if distrusted is not None:
        return step, distrusted

    def leave_or_keep(found: dict[str, Any]) -> str | None:
        # The thread of the last save may be copying it: nothing may change it meanwhile.
        is_saved = progress.phase == "checkpoint"
        is_whole = not is_saved and replica.before_hook is None
        fits = may_stay and is_whole and may_serve_again(progress.began, replica.parts)
        if fits and end_process_group():
            keep_in_process(replica, made_by, found)
            return None
        return leave_snapshot(made_by, found)

    return step, keep_state(ctx, state, partial(_last_committed, replica), leave_or_keep)


def keep_in_process(replica: Replica, made_by: WorkerContext, found: dict[str, Any]) -> None:
    """Keep the state ``found``, and everything that it was trained with, in this process."""
    parts, state = replica.parts, replica.state
    if not state.complete:  # it is a copy from before the step
        state.load_state_dict(found)
    parts.moving |= {place.name for place in replica.volatile.moving}
    parts.ignored |= {place.name for place in replica.volatile.ignored}
    survivor.keep(parts, made_by, found)
    logger.info("step %d stays in this process", state.step)


def keep_state(
    ctx: WorkerContext,
    state: KeptState,
    whole: Callable[[], dict[str, Any] | str],
    leave: Callable[[dict[str, Any]], str | None] | None = None,
) -> str | None:
    """Leave the state of the last committed step as a snapshot. Return why that cannot be done, or
    None.

    Args:
        whole: returns that state, or why there is none.
        leave: is given that state if it is sound; None to leave a snapshot.
    """
    try:
        found = whole()
        if isinstance(found, str):
            return found
        state.require_sound(found)
        return leave_snapshot(ctx, found) if leave is None else leave(found)
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
    if is_torn(replica):
        return TORN
    if torn := replica.volatile.put_back():
        return not_copied(torn)
    return replica.state.state_dict()


def not_copied(torn: list[str]) -> str:
    """Return why a state is torn in which the failed step changed these tensors."""
    return (
        f"the failed step changed {', '.join(torn)}, and no copy was kept of what was there before"
    )


def save_last(ctx: WorkerContext, progress: RankProgress) -> bool:
    """Commit the state of the last committed step as a checkpoint, after an error of a rank that is
    alone. Raises nothing. Return whether a checkpoint holds that state now."""
    replica, training = progress.replica, progress.training
    if replica is None:
        return False
    state, own = replica.state, replica.own_updates
    if not state.complete and own is not None and own.shadow.newest is not None:
        state.load_state_dict(own.shadow.newest)
    if not state.complete or is_torn(replica):
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
