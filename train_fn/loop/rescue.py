"""Keep the state of a rank whose training thread waits for peers that are gone.

Where collectives do not fail by themselves, only an abort frees that thread, and an abort may take
long or never end. So the thread that is about to abort copies the state first and leaves it as a
snapshot. It may do so because the training thread stands still: what it changes between two steps
is whole, and what a forward pass changes is read from the values that the step began with.

A GPU on which a kernel hangs copies memory, but CUDA waits for it to load a kernel or to make the
first stream. So the stream is made ahead, and the copy runs no kernel but comparisons that have run
before.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from train_fn.context import WorkerContext
from train_fn.loop.training import RankProgress
from train_fn.snapshots.publisher import leave_snapshot
from train_fn.state.optim import Packer, each_of
from train_fn.state.run_state import CopyMemory
from train_fn.state.tensor_tree import copy_to_cpu
from train_fn.step import nccl

PATIENCE_S = 5.0
"""Longest wait until the training thread stands still, in a phase in which its state is whole."""
_LOOK_S = 0.01
_WHOLE_IN = frozenset({"step", "data", "checkpoint"})
"""Phases in which the model holds the weights of the last step: an evaluation may have put an
average in their place, and a restore has none yet."""

logger = logging.getLogger(__name__)


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
        self._packer = Packer()
        self.kept_step: int | None = None
        """Step of the state that was left as a snapshot."""
        nccl.keep_before_abort(self.keep)

    def prepare(self) -> None:
        """Take the memory of a copy. Called by the training thread, once the state is restored."""
        if self._progress.replica is not None and not nccl.fails_by_itself():
            self._take_memory()
            self._replica.volatile.rehearse()
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
        state: dict[str, Any] = self._replica.state.state_dict(packed=False)
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
        is_there = self._replica.state.complete or self._shadow() is not None
        return self._progress.phase in _WHOLE_IN and is_there

    def _shadow(self) -> dict[str, Any] | None:
        """Return the copy of the state that a task's own step keeps, within one."""
        replica = self._progress.replica
        own = None if replica is None else replica.own_updates
        return None if own is None else own.shadow.newest

    def _copy(self) -> dict[str, Any] | None:
        """Return the state as the step began; None if something changes of which there is no
        copy."""
        with self._beside_the_hung():
            return self._copy_here()

    def _copy_here(self) -> dict[str, Any] | None:
        replica = self._replica
        if not replica.state.complete:
            return self._into_memory(self._shadow())
        state = self._live()
        before = replica.volatile.before_step()
        if before is None:
            return None
        for place, value in before:
            part = state["model" if place.is_saved else "unsaved"]
            if place.name not in part:
                return None
            now = part[place.name]
            shared = [name for name, other in part.items() if _is_same(other, now)]
            part.update(dict.fromkeys(shared, value))
        copied = self._into_memory(state)
        # Ranks compare states by their digests, and the others pack their moments.
        return copied | {"optimizer": self._packer.packed(copied["optimizer"])}

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
