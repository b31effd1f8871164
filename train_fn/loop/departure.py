"""How a rank leaves an attempt that broke: it lets its peers go, and keeps its state."""

from __future__ import annotations

import dataclasses
import logging
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
    forget_frames,
)
from train_fn.loop import survivor
from train_fn.loop.commit import TORN, is_torn
from train_fn.loop.replica import Replica
from train_fn.loop.survivor import may_serve_again
from train_fn.loop.training import RankProgress
from train_fn.node.device import keep_if_broken
from train_fn.node.memory import memory_summary
from train_fn.recovery.evidence import RankError, StepFailed
from train_fn.session.session import Remains, keep_state, not_copied, pieces_left
from train_fn.session.session import leave as leave_attempt
from train_fn.snapshots.election import newest_durable
from train_fn.snapshots.publisher import leave_snapshot
from train_fn.snapshots.store import kept_step as kept_step_here
from train_fn.step.peers import end_process_group

BETWEEN_STATES = "the rank was between two states"
"""Why a rank leaves no state, if it failed while it changed it."""

_LEAVING = (Replaced, PeerApart, PeerMiscomputed)
"""Errors after which a rank keeps nothing in its process, though others caused them."""

logger = logging.getLogger(__name__)


class _Departure:
    """What Everstep's loop does when its attempt broke (``Leaver``)."""

    def __init__(self, ctx: WorkerContext, progress: RankProgress) -> None:
        self._ctx, self._progress = ctx, progress
        self._rescued = progress.rescue.leave() if progress.rescue is not None else None
        self._distrusted: str | None = None
        self._may_stay = False
        self._error: RankError | None = None
        self.memory: str | None = None

    def let_go(self, cause: BaseException, error: RankError) -> None:
        ctx, replica, training = self._ctx, self._progress.replica, self._progress.training
        self._error = error
        self._distrusted = _why_distrusted(ctx, cause)
        self._may_stay = ctx.in_process and error.collateral and not isinstance(cause, _LEAVING)
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
        """Leave the state as a snapshot, or where it is (``survivor``) if this rank merely lost a
        peer and its process may serve the next attempt."""
        training = self._progress.training
        if training is not None and training.session.holdings is not None:
            assert self._error is not None
            training.profiler.give_up()
            left = pieces_left(training.session, self._error)
            if self._distrusted is not None:
                return Remains(left.step, self._distrusted)
            return self._vacated(left)
        step, problem = _leave_state(
            self._ctx, self._progress, distrusted=self._distrusted, may_stay=self._may_stay
        )
        stays_at = kept_step_here()
        if problem is not None and self._distrusted is None and self._rescued is not None:
            step, problem = self._rescued, None  # a device that fails now was read before
        if training is not None:
            training.profiler.give_up()
        is_on_node = problem is None and stays_at is None
        return Remains(step, problem, step if is_on_node else None, stays_at)

    def _vacated(self, left: Remains) -> Remains:
        """Let this process serve the next attempt as well, if it may and its piece is there."""
        replica = self._progress.replica
        assert replica is not None
        at = left.snapshot_step
        fits = self._may_stay and at is not None
        if fits and may_serve_again(self._progress.began, replica.parts) and end_process_group():
            assert at is not None
            survivor.vacate(replica.parts, self._ctx, at)
            return left._replace(stays_at=at)
        return left


def leave(ctx: WorkerContext, progress: RankProgress, cause: BaseException) -> StepFailed:
    """Leave an attempt that broke (``session.leave``), and return what happened."""
    departure, training = _Departure(ctx, progress), progress.training
    session = None if training is None else training.session
    error, problem = leave_attempt(ctx, session, cause, departure)
    progress.replica = progress.training = progress.survivor = None
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
    if state.piece is not None:
        return step, "the attempt made no step; pieces of an earlier one stay where they are"
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
