"""Hand saves from the training thread to the thread that writes them. While one is written, at most
one other waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from train_fn.state.run_state import CopyMemory, RunState
from train_fn.state.tensor_tree import copy_to_cpu

# ---------------------------------------------------------------- state copy

# Copy the training state between two steps, so that threads can write the copy while training
# continues.

Boundary = tuple[int, int, int, bool]
"""What identifies a state within an attempt. After an evaluation, and after the task's
``on_epoch_end``, it is another state at the same step."""


def boundary_of(step: int, state: Mapping[str, Any]) -> Boundary:
    """Return the boundary of a state, given its entries."""
    due = state.get("hook_due", False)  # a user's own loop has no such hook
    return step, state["evaluated_step"], state["closed_epochs"], due


@dataclass
class BoundaryCopy:
    """Hold the state after ``step``, on the CPU. Its memory is not reused until every holder has
    released it."""

    step: int
    epoch: int
    state: dict[str, Any]
    stall_s: float
    """Seconds for which the copy blocked training."""
    num_holders: int = 1


class BoundaryCopies:
    """Make copies in reused memory. Callers at the same step boundary share one copy.

    Between two steps the state changes when an epoch is closed, when it is evaluated, and in the
    task's ``on_epoch_end``.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._newest: BoundaryCopy | None = None
        self._boundary: Boundary | None = None
        """That of the newest copy."""
        self._memory = CopyMemory()

    def is_ready(self) -> bool:
        """Return whether ``take`` finds pinned memory. If it would not, a thread takes some while
        training goes on. Called by the training thread, between two steps."""
        with self._lock:
            if self._held_at(boundary_of(self._state.step, vars(self._state))) is not None:
                return True
        return self._memory.is_ready(self._state.state_dict)

    def take(self) -> BoundaryCopy:
        """Return a copy of the current state. The training thread calls this between two steps, and
        the copy must be released later.

        Raise StateNotWhole or NonFiniteWeights for a state that must not be saved.
        """
        began = time.perf_counter()
        boundary = boundary_of(self._state.step, vars(self._state))
        with self._lock:
            if (newest := self._held_at(boundary)) is not None:
                newest.num_holders += 1
                return newest
        live = self._state.state_dict()
        self._state.require_sound(live)
        tree = copy_to_cpu(live, self._memory.take())
        copy = BoundaryCopy(self._state.step, self._state.epoch, tree, time.perf_counter() - began)
        with self._lock:
            self._newest, self._boundary = copy, boundary
        return copy

    def release(self, copy: BoundaryCopy) -> None:
        """Release a copy, once for each ``take``, from any thread. After the last release, a later
        copy reuses the memory.

        The memory of only one copy is kept for reuse.
        """
        with self._lock:
            copy.num_holders -= 1
            if not copy.num_holders:
                self._memory.put(copy.state)
                copy.state = {}

    def _held_at(self, boundary: Boundary) -> BoundaryCopy | None:
        """Return the newest copy, if it is of this boundary and somebody holds it."""
        newest = self._newest if boundary == self._boundary else None
        return newest if newest is not None and newest.num_holders else None


# ---------------------------------------------------------------- save slot

STALLED_S = 60.0
"""A save counts as failed if the storage takes no byte for this many seconds, and again after each
further period of this length."""


def stalled_error() -> str:
    """Return the error of a save that stalled, for its event."""
    return f"StorageUnavailable: the storage took no byte for {STALLED_S:g} s"


@dataclass(frozen=True)
class Save:
    """Describe a checkpoint to write. It holds its copy of the state until then."""

    copy: BoundaryCopy
    is_best: bool
    best: str | None
    """Name of the best checkpoint, which retention keeps."""
    retry_until: float
    """The save of this state is retried until then. A periodic save is not retried: the next one
    has a newer state."""


class SaveSlot:
    """Hold the save that waits and the one that is written. Times are monotonic seconds.

    Args:
        mutex: guards all fields here, and what the caller changes together with them.
        release: is called with each copy that is not needed any more.
    """

    def __init__(self, mutex: threading.RLock, release: Callable[[BoundaryCopy], None]) -> None:
        self._changed = threading.Condition(mutex)
        self._release = release
        self.waiting: Save | None = None
        self.current: Save | None = None
        self._moved_at: float | None = None
        """When the storage last took bytes of the current save; None between two attempts."""
        self._closed = self._hurry = False

    # -- the training thread

    def make_room(self, *, for_best: bool) -> bool:
        """Drop the save that waits. Return False, and keep it, if the slot is closed or if it holds
        the best state and the new save would not."""
        with self._changed:
            if self._closed or (self.waiting is not None and self.waiting.is_best and not for_best):
                return False
            self._drop_waiting()
            return True

    def put(self, save: Save) -> None:
        """Let a save wait for the writing thread."""
        with self._changed:
            self.waiting = save
            self._changed.notify_all()

    def hurry(self) -> None:
        """Stop retries of best states, because the run's last state is waiting."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()

    def wait_idle(self, deadline: float) -> bool:
        """Wait until nothing is left to write. After ``deadline`` wait only while bytes move.
        Return whether all is written."""
        with self._changed:
            while self.waiting is not None or self.current is not None:
                last = deadline
                if self._moved_at is not None:
                    last = max(deadline, self._moved_at + STALLED_S)
                left_s = last - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(min(left_s, 1.0))
            return True

    def newly_stalled(self, now: float) -> Save | None:
        """Return the current save if the storage took no byte for STALLED_S, once in each such
        period."""
        if self.current is None or self._moved_at is None or now - self._moved_at < STALLED_S:
            return None
        self._moved_at = now
        return self.current

    def close(self) -> None:
        """Accept no more saves, and drop the one that waits."""
        with self._changed:
            self._closed = True
            self._drop_waiting()
            self._changed.notify_all()

    def _drop_waiting(self) -> None:
        if self.waiting is not None:
            self._release(self.waiting.copy)
            self.waiting = None

    # -- the writing thread

    def next(self) -> Save | None:
        """Wait for a save and make it the current one. Return None once the slot is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.waiting is not None or self._closed)
            self.current, self.waiting = self.waiting, None
            return self.current

    def moved(self) -> None:
        """Note that the storage took bytes of the current save."""
        self._moved_at = time.monotonic()

    def wait_to_retry(self, save: Save, pause_s: float) -> bool:
        """Wait for ``pause_s`` after a failure. Return whether to write the same copy again: not if
        its time is over, or a newer save waits."""
        with self._changed:
            self._moved_at = None
            left_s = save.retry_until - time.monotonic()
            if left_s <= 0 or self._is_in_the_way(save):
                return False
            self._changed.wait_for(
                lambda: self._closed or self._is_in_the_way(save), min(pause_s, left_s)
            )
            return not self._closed and self.waiting is None

    def _is_in_the_way(self, save: Save) -> bool:
        """Return whether a newer save waits for this one, or will once it is gone."""
        return self.waiting is not None or (self._hurry and save.retry_until == float("inf"))

    def done(self, save: Save) -> None:
        """Release the current save, written or not."""
        self._release(save.copy)
        with self._changed:
            self.current = self._moved_at = None
            self._changed.notify_all()
