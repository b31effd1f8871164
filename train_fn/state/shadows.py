"""Shadows: copies of a whole state, for loops that change it in several parts with collectives in
between."""

from __future__ import annotations

from typing import Any

from train_fn.state.kept_state import KeptState
from train_fn.state.tensor_tree import copy_to_cpu


class Shadows:
    """Hold the state of the newest commit.

    Args:
        keeps_older: also hold that of the commit before. While one is written, the other stays
            whole. Without it, take the copy only while the state itself is whole.
    """

    def __init__(self, state: KeptState, *, keeps_older: bool = True) -> None:
        self._state, self._keeps_older = state, keeps_older
        self.newest: dict[str, Any] | None = None
        self.older: dict[str, Any] | None = None

    def take(self) -> None:
        """Copy the present state as that of the newest commit."""
        if not self._keeps_older:
            memory, self.newest = self.newest, None
            self.newest = self._copy(into=memory)
            return
        self.newest, self.older = self._copy(into=self.older), self.newest

    def renew(self) -> None:
        """Copy the newest commit again: its epoch was closed since."""
        self.newest = self._copy(into=None)

    def _copy(self, into: dict[str, Any] | None) -> dict[str, Any]:
        copied: dict[str, Any] = copy_to_cpu(self._state.state_dict(), into)
        return copied
