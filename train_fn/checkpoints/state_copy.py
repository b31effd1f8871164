"""Copies of the training state between two steps, for those who write them to somewhere while
training goes on."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from train_fn.state.tensor_tree import copy_to_cpu
from train_fn.state.train_state import TrainState


@dataclass
class BoundaryCopy:
    """The state after ``step``, on the CPU. Later steps leave it alone until everybody who took it
    has released it."""

    step: int
    epoch: int
    state: dict[str, Any]
    stall_s: float
    """How long training stood still for the copy."""
    num_holders: int = 1


class BoundaryCopies:
    """Makes the copies, in memory that is used again. Who asks at the same boundary shares one
    copy.

    Between two steps the state changes where an epoch is closed, and where it is evaluated.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._newest: BoundaryCopy | None = None
        self._boundary = (-1, -1, -1)
        """What the newest copy is of: steps done, epochs closed, step of the last evaluation."""
        self._free: dict[str, Any] | None = None

    def take(self) -> BoundaryCopy:
        """A copy of the present state. Called by the training thread, between two steps; whoever
        calls must release it.

        Raises StateNotWhole, NonFiniteWeights for a state that must not be kept.
        """
        began = time.perf_counter()
        boundary = (self._state.step, self._state.closed_epochs, self._state.evaluated_step)
        with self._lock:
            newest = self._newest
            if newest is not None and newest.num_holders and boundary == self._boundary:
                newest.num_holders += 1
                return newest
            reuse, self._free = self._free, None
        live = self._state.state_dict()
        self._state.require_sound(live)
        tree = copy_to_cpu(live, reuse)
        copy = BoundaryCopy(self._state.step, self._state.epoch, tree, time.perf_counter() - began)
        with self._lock:
            self._newest, self._boundary = copy, boundary
        return copy

    def release(self, copy: BoundaryCopy) -> None:
        """Called from any thread, once for each ``take``: the last one gives the memory to a later
        copy.

        One copy's memory is kept for that, whatever number was held at a time.
        """
        with self._lock:
            copy.num_holders -= 1
            if not copy.num_holders:
                self._free, copy.state = copy.state, {}
