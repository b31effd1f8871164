"""Copy the training state between two steps, so that threads can write the copy while training
continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from train_fn.state.copy_memory import CopyMemory
from train_fn.state.kept_state import KeptState
from train_fn.state.tensor_tree import copy_to_cpu

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

    def __init__(self, state: KeptState) -> None:
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
