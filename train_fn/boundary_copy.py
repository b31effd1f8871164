"""Copies of the training state between two steps, for those who write them to somewhere while training goes on."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from train_fn.state import TrainState
from train_fn.tensor_tree import copy_to_cpu


@dataclass
class BoundaryCopy:
    """The state after ``step``, on the CPU. Later steps leave it alone until everybody who took it has released it."""

    step: int
    epoch: int
    state: dict[str, Any]
    stall_s: float
    """How long training stood still for the copy."""
    num_holders: int = 1


class BoundaryCopies:
    """Makes the copies, in memory that is used again. Who asks at the same boundary shares one copy.

    Two callers at one step see one boundary: the state changes only with its step, and what closes an epoch comes before.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._newest: BoundaryCopy | None = None
        self._free: dict[str, Any] | None = None

    def take(self) -> BoundaryCopy:
        """A copy of the present state. Called by the training thread, between two steps; whoever calls must release it."""
        began = time.perf_counter()
        with self._lock:
            newest = self._newest
            if newest is not None and newest.num_holders and newest.step == self._state.step:
                newest.num_holders += 1
                return newest
            reuse, self._free = self._free, None
        tree = copy_to_cpu(self._state.state_dict(), reuse)
        copy = BoundaryCopy(self._state.step, self._state.epoch, tree, time.perf_counter() - began)
        with self._lock:
            self._newest = copy
        return copy

    def release(self, copy: BoundaryCopy) -> None:
        """Called from any thread, once for each ``take``: the last one gives the memory to a later copy.

        One copy's memory is kept for that, whatever number was held at a time.
        """
        with self._lock:
            copy.num_holders -= 1
            if not copy.num_holders:
                self._free, copy.state = copy.state, {}
