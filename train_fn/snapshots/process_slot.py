"""What a rank keeps in its process from one attempt to the next: its state, where it lives.

One slot for each process. The training thread fills it when it leaves an attempt, and empties it
when it enters the next one. If no attempt follows in this process, an actor's call empties it.
"""

from __future__ import annotations

import threading
from typing import Protocol


class Stay(Protocol):
    """What stays in this process: a state, whole at a committed step, or what has no state yet."""

    @property
    def step(self) -> int | None:
        """Return the number of steps done in the state; None without one."""

    def leave(self) -> str | None:
        """Write the state as a snapshot on this node. Return why that cannot be done, or None."""


_lock = threading.Lock()
"""Held while the state is written: whoever takes it would change it."""
_stay: Stay | None = None


def keep(stay: Stay) -> None:
    """Keep a state for the next attempt in this process, in place of an older one."""
    global _stay
    with _lock:
        _stay = stay


def take() -> Stay | None:
    """Return the state that is kept, and empty the slot. Only one caller gets it."""
    global _stay
    with _lock:
        stay, _stay = _stay, None
    return stay


def kept_step() -> int | None:
    """Return the step of the state that is kept; None without one. Never waits."""
    stay = _stay
    return None if stay is None else stay.step


def insure() -> str | None:
    """Write the state that is kept as a snapshot, and keep it. Return as ``leave_kept_state``.

    Whoever takes the state meanwhile waits. Any thread may call this while the training thread does
    not run.
    """
    with _lock:
        return None if _stay is None else _stay.leave()


def leave_kept_state() -> str | None:
    """Write the state that is kept as a snapshot, and let go of it. Return why that cannot be done;
    None if it was written, or if there is none.

    Any thread may call this while the training thread does not run.
    """
    stay = take()
    return None if stay is None else stay.leave()


def drop() -> None:
    """Let go of the state that is kept."""
    take()
