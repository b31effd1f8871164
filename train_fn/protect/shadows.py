"""Shadows: copies of the whole state, taken after every step of a loop with ``torn='shadow'``."""

from __future__ import annotations

from typing import Any

from train_fn.protect.loop_state import LoopState
from train_fn.state.tensor_tree import copy_to_cpu


class Shadows:
    """Hold the states of the newest commit and of the one before. While one is written, the other
    stays whole."""

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self.newest: dict[str, Any] | None = None
        self.older: dict[str, Any] | None = None

    def take(self) -> None:
        """Copy the present state as that of the newest commit."""
        self.newest, self.older = self._copy(into=self.older), self.newest

    def renew(self) -> None:
        """Copy the newest commit again: its epoch was closed since."""
        self.newest = self._copy(into=None)

    def _copy(self, into: dict[str, Any] | None) -> dict[str, Any]:
        copied: dict[str, Any] = copy_to_cpu(self._state.state_dict(), into)
        return copied
