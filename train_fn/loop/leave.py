"""How a rank leaves an attempt that broke: it lets its peers go, and leaves its state. Below: who
leaves it while the training thread waits for peers that are gone.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch

from train_fn.checkpoints.save_slot import BoundaryCopies
from train_fn.checkpoints.saver import STOP_PATIENCE_S, Saver
from train_fn.context import WorkerContext
from train_fn.errors import Miscomputed, PeerApart, RanksApart, forget_frames
from train_fn.loop.epoch_end import TORN
from train_fn.loop.training import RankProgress
from train_fn.node.device import keep_if_broken
from train_fn.node.memory import memory_summary
from train_fn.recovery.evidence import RankError, StepFailed
from train_fn.session.session import leave as leave_attempt
from train_fn.session.session import not_copied
from train_fn.snapshots.keeper import Remains
from train_fn.snapshots.last_save import newest_durable
from train_fn.snapshots.leaving import leave_snapshot
from train_fn.state.optim import each_of
from train_fn.state.run_state import CopyMemory
from train_fn.state.tensor_tree import copy_to_cpu
from train_fn.step import nccl

logger = logging.getLogger(__name__)


class _Leaving:
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
        if replica is not None and not broken:
            replica.let_go()

    def close(self) -> None:
        if self._progress.training is not None:
            self._progress.training.loader.close()  # its processes may take a moment to end

    def keep(self) -> Remains:
        """Leave the state for the next attempt."""
        progress, distrusted = self._progress, self._distrusted
        replica, session, training = progress.replica, progress.session, progress.training
        if replica is None or session is None:
            return Remains(None, "the rank had no state yet")
        assert self._error is not None
        whole = partial(_last_committed, progress)
        left = session.keeper.leave(self._error, whole, distrusted=distrusted)
        if left.problem is not None and distrusted is None and self._rescued is not None:
            left = Remains(self._rescued, None, self._rescued)  # what fails now was read before
        if not (progress.is_restored or replica.state.complete):
            left = left._replace(step=None)
        if training is not None:
            training.profiler.give_up()
        return left


def leave(ctx: WorkerContext, progress: RankProgress, cause: BaseException) -> StepFailed:
    """Leave an attempt that broke (``session.leave``), and return what happened."""
    leaving = _Leaving(ctx, progress)
    error, problem = leave_attempt(ctx, progress.session, cause, leaving)
    progress.replica = progress.training = progress.session = None
    error = dataclasses.replace(error, phase=progress.phase, memory=leaving.memory)
    return StepFailed(error, problem)


def _why_distrusted(ctx: WorkerContext, cause: BaseException) -> str | None:
    """Return why this rank's state is not kept, if that follows from what broke the attempt."""
    if isinstance(cause, RanksApart | PeerApart):
        return "ranks went apart, so the state may hold wrong bits"
    named = cause.ranks if isinstance(cause, Miscomputed) else ()
    if ctx.world_rank in named and len(named) < ctx.world_size:
        return "this rank computes wrongly; the others keep the same state"
    return None


def _is_torn(progress: RankProgress) -> bool:
    """Return whether the task's hook at the end of an epoch had changed a part of the state."""
    return progress.training is not None and progress.training.epoch_end.is_torn()


def _last_committed(progress: RankProgress) -> dict[str, Any] | str:
    """Return the state of the last committed step, or why there is none."""
    replica = progress.replica
    assert replica is not None
    if not replica.state.complete:
        own = replica.own
        copied = None if own is None else own.before.newest
        return copied or "the rank was between two states"
    if _is_torn(progress):
        return TORN
    if torn := replica.passes.moving.put_back():
        return not_copied(torn)
    return replica.state.state_dict()


def save_last(ctx: WorkerContext, progress: RankProgress) -> bool:
    """Commit the state of the last committed step as a checkpoint, after an error of a rank that is
    alone. Raises nothing. Return whether a checkpoint holds that state now."""
    replica, training = progress.replica, progress.training
    if replica is None:
        return False
    state, own = replica.state, replica.own
    if not state.complete and own is not None and own.before.newest is not None:
        state.load_state_dict(own.before.newest)
    if not state.complete or _is_torn(progress):
        return False
    replica.passes.moving.put_back()
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


# ---------------------------------------------------------------- rescue

# Where collectives do not fail by themselves, only an abort frees that thread, and an abort may
# take long or never end. So the thread that is about to abort copies the state first and leaves it
# as a snapshot. It may do so because the training thread stands still: what it changes between two
# steps is whole, and what a forward pass changes is read from the values that the step began with.
#
# A GPU on which a kernel hangs copies memory, but CUDA waits for it to load a kernel or to make the
# first stream. So the stream is made ahead, and the copy runs no kernel but comparisons that have
# run before.

PATIENCE_S = 5.0
"""Longest wait until the training thread stands still, in a phase in which its state is whole."""
_LOOK_S = 0.01
_WHOLE_IN = frozenset({"step", "data", "checkpoint"})
"""Phases in which the model holds the weights of the last step: an evaluation may have put an
average in their place, and a restore has none yet."""


class Rescue:
    """Keep the state of one attempt. The thread that trains makes it."""

    def __init__(self, ctx: WorkerContext, progress: RankProgress) -> None:
        self._ctx, self._progress = ctx, progress
        self._trains = threading.get_ident()
        self._is_leaving = False
        self._lock = threading.Lock()
        on_gpu = ctx.device.type == "cuda"
        self._work = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        """The device's work that a copy has to wait for."""
        self._stream = torch.cuda.Stream(ctx.device) if on_gpu else None  # type: ignore[no-untyped-call]
        """The training thread's own stream is blocked then."""
        self._memory = CopyMemory()
        """Taken ahead: pinning may wait for a device that hangs."""
        self._num_values: int | None = None
        """Number of parameters that had optimizer values when memory was taken; None if none is
        needed."""
        self.kept_step: int | None = None
        """Step of the state that was left as a snapshot."""
        nccl.keep_before_abort(self.keep)

    def prepare(self) -> None:
        """Take the memory of a copy. Called by the training thread, once the state is restored."""
        if self._progress.replica is not None and not nccl.fails_by_itself():
            self._take_memory()
            self._replica.passes.moving.rehearse()
        self.note_work()

    def step_committed(self) -> None:
        """Take memory for what the step has added. Called after each commit."""
        if (
            self._num_values is not None
            and self._num_values != self._count_values()  # it has its tensors after one step
            and self._memory.is_ready(self._live)
        ):
            self._take_memory()
        self.note_work()

    def note_work(self) -> None:
        """Let a copy wait for all work that the device has been given by now. Called after each
        commit, and once a step has kept what its forward passes change."""
        if self._work is not None:
            self._work.record()

    def _take_memory(self) -> None:
        self._num_values = self._count_values()
        self._into_memory(self._live())

    def _live(self) -> dict[str, Any]:
        state: dict[str, Any] = self._replica.state.state_dict()
        return state

    def _into_memory(self, state: Any) -> dict[str, Any]:
        """Return a copy of ``state``, whose memory the next copy overwrites."""
        copied: dict[str, Any] = copy_to_cpu(state, self._memory.take())
        self._memory.put(copied)
        return copied

    def _count_values(self) -> int:
        return sum(len(each.state) for each in each_of(self._replica.state.optimizer).values())

    def leave(self) -> int | None:
        """End the rescue, since the training thread leaves by itself. Return the step that was kept
        by then."""
        self._is_leaving = True
        with self._lock:
            nccl.keep_before_abort(None)
            return self.kept_step

    def keep(self) -> None:
        """Leave the state of the last committed step on this node, if the training thread stands
        still where that is whole. Called by the thread that is about to abort."""
        with self._lock:
            state = self._copied()
            if state is None:
                return
            problem = leave_snapshot(self._ctx, state)
            if problem is None:
                self.kept_step = state["step"]
                self._ctx.report_kept(state["step"])
                logger.info("kept step %d before the abort", self.kept_step)

    def _copied(self) -> dict[str, Any] | None:
        gives_up_at = time.monotonic() + PATIENCE_S
        while not self._is_leaving and time.monotonic() < gives_up_at:
            place = self._place()
            if place is None:
                return None
            time.sleep(_LOOK_S)
            if self._place() == place and self._is_whole():
                state = self._copy()
                if state is not None and self._place() == place and self._is_whole():
                    self._replica.state.require_sound(state)
                    return state
        if not self._is_leaving:
            logger.warning(
                "nothing is kept before the abort: for %g s the training thread stood nowhere "
                "where its state is whole (phase %s)",
                PATIENCE_S,
                self._progress.phase,
            )
        return None

    def _place(self) -> tuple[FrameType, int, int] | None:
        """Return where the training thread is; it is equal only if the thread has not moved. None
        if it has ended, or has no state yet."""
        frame, replica = sys._current_frames().get(self._trains), self._progress.replica
        if frame is None or replica is None:
            return None
        return frame, frame.f_lasti, replica.state.step

    @property
    def _replica(self) -> Any:
        assert self._progress.replica is not None
        return self._progress.replica

    def _is_whole(self) -> bool:
        is_there = self._replica.state.complete or self._before() is not None
        return self._progress.phase in _WHOLE_IN and is_there

    def _before(self) -> dict[str, Any] | None:
        """Return the copy of the state that a task's own step keeps, within one."""
        replica = self._progress.replica
        own = None if replica is None else replica.own
        return None if own is None else own.before.newest

    def _copy(self) -> dict[str, Any] | None:
        """Return the state as the step began; None if something changes of which there is no
        copy."""
        with self._beside_the_hung():
            return self._copy_here()

    def _copy_here(self) -> dict[str, Any] | None:
        replica = self._replica
        if not replica.state.complete:
            return self._into_memory(self._before())
        state = self._live()
        before = replica.passes.moving.before_step()
        if before is None:
            return None
        for place, value in before:
            part = state["model" if place.is_saved else "unsaved"]
            if place.name not in part:
                return None
            now = part[place.name]
            shared = [name for name, other in part.items() if _is_same(other, now)]
            part.update(dict.fromkeys(shared, value))
        return self._into_memory(state)

    @contextmanager
    def _beside_the_hung(self) -> Iterator[None]:
        """Copy on a stream of its own, once the work before the hang is done."""
        if self._stream is None or self._work is None:
            yield
            return
        torch.cuda.set_device(self._ctx.device)
        self._stream.wait_event(self._work)
        with torch.cuda.stream(self._stream):
            yield


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both are one tensor: a module that is used twice has it under two names."""
    return one is other or (
        one.data_ptr() == other.data_ptr() and one.numel() > 0 and one.shape == other.shape
    )
