"""How a rank leaves an attempt that broke: it lets its peers go, and leaves its state."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from typing import Any

from train_fn.checkpoints.save_slot import BoundaryCopies
from train_fn.checkpoints.saver import STOP_PATIENCE_S, Saver
from train_fn.context import WorkerContext
from train_fn.errors import Miscomputed, PeerApart, RanksApart, forget_frames
from train_fn.loop.commit import TORN, is_torn
from train_fn.loop.replica import Replica
from train_fn.loop.training import RankProgress
from train_fn.node.device import keep_if_broken
from train_fn.node.memory import memory_summary
from train_fn.recovery.evidence import RankError, StepFailed
from train_fn.session.session import Remains, keep_state, not_copied, pieces_left
from train_fn.session.session import leave as leave_attempt
from train_fn.snapshots.election import newest_durable
from train_fn.snapshots.lending import leave as leave_state

BETWEEN_STATES = "the rank was between two states"
"""Why a rank leaves no state, if it failed while it changed it."""

logger = logging.getLogger(__name__)


class _Departure:
    """What Everstep's loop does when its attempt broke (``Leaver``)."""

    def __init__(self, ctx: WorkerContext, progress: RankProgress) -> None:
        self._ctx, self._progress = ctx, progress
        self._rescued = progress.rescue.leave() if progress.rescue is not None else None
        self._distrusted: str | None = None
        self._error: RankError | None = None
        self.memory: str | None = None

    def let_go(self, cause: BaseException, error: RankError) -> None:
        ctx, replica, training = self._ctx, self._progress.replica, self._progress.training
        self._error = error
        self._distrusted = _why_distrusted(ctx, cause)
        self.memory = memory_summary(cause, ctx.device)
        broken = keep_if_broken(ctx.device, cause, replica, training)
        if not broken:
            forget_frames(cause)
        if training is not None:
            training.clock.close()
            if (holdings := training.session.holdings) is not None:
                holdings.let_go()
        if replica is not None and not broken:
            replica.let_go()

    def close(self) -> None:
        if self._progress.training is not None:
            self._progress.training.loader.close()  # its processes may take a moment to end

    def keep(self) -> Remains:
        """Leave the state for the next attempt."""
        training = self._progress.training
        if training is not None and training.session.holdings is not None:
            assert self._error is not None
            training.profiler.give_up()
            left = pieces_left(training.session, self._error)
            if self._distrusted is not None:
                return Remains(left.step, self._distrusted)
            return left
        step, problem = _leave_state(self._ctx, self._progress, distrusted=self._distrusted)
        if problem is not None and self._distrusted is None and self._rescued is not None:
            step, problem = self._rescued, None  # a device that fails now was read before
        if training is not None:
            training.profiler.give_up()
        return Remains(step, problem, step if problem is None else None)


def leave(ctx: WorkerContext, progress: RankProgress, cause: BaseException) -> StepFailed:
    """Leave an attempt that broke (``session.leave``), and return what happened."""
    departure, training = _Departure(ctx, progress), progress.training
    session = None if training is None else training.session
    error, problem = leave_attempt(ctx, session, cause, departure)
    progress.replica = progress.training = None
    error = dataclasses.replace(error, phase=progress.phase, memory=departure.memory)
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
    ctx: WorkerContext, progress: RankProgress, *, distrusted: str | None
) -> tuple[int | None, str | None]:
    """Leave the state of the last committed step.

    Args:
        distrusted: why the state must not be used, if it must not.

    Return its step, and why it cannot be left.
    """
    replica = progress.replica
    if replica is None:
        return None, "the rank had no state yet"
    state = replica.state
    step = state.step if progress.is_restored or state.complete else None
    if state.piece is not None:
        return step, "the attempt made no step; pieces of an earlier one stay where they are"
    if distrusted is not None:
        return step, distrusted
    return step, keep_state(ctx, state, partial(_last_committed, replica), leave_state)


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
            saver = training.session.saver if training else Saver(ctx, state, BoundaryCopies(state))
            saver.save_now(patience_s=STOP_PATIENCE_S)
    except Exception as exc:  # what broke the attempt says more
        logger.warning(
            "the state of step %d could not be saved as a checkpoint: %s", state.step, exc
        )
        return False
    return True
