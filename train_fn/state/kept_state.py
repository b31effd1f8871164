"""KeptState: what saving, publishing, leaving and restoring use of a run's state, whoever's loop
changes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from train_fn.state.tensor_tree import (
    TensorShape,
    copy_to_cpu,
    lacking_memory,
    new_memory,
    on_gpu,
    put_together,
)
from train_fn.state.train_state import BestSoFar, EventTail


class KeptState(Protocol):
    """The state of a run: that of Everstep's loop (``TrainState``), or of a user's own loop. Its
    ``state_dict`` has the same entries."""

    step: int
    """Steps done."""
    closed_epochs: int
    """Epochs whose end was reported."""
    evaluated_step: int
    """Steps done at the last evaluation."""
    best: BestSoFar | None
    parent: str | None
    """Newest committed checkpoint that this rank knows this state to descend from."""
    tail: EventTail
    complete: bool
    """Whether a run can resume from this state."""

    @property
    def epoch(self) -> int: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as nested dicts of plain values and live tensors."""

    def load_state_dict(self, state: dict[str, Any], *, gives_memory: bool = False) -> None:
        """Load a state. ``state`` is copied and not changed. If it ``gives_memory``, the state may
        keep parts of it, which the caller does not use afterwards."""

    def require_sound(self, state: Mapping[str, Any]) -> None:
        """Raise StateNotWhole or NonFiniteWeights for a state that must not be kept."""


# ---------------------------------------------------------------- shadows

# Shadows: copies of a whole state, for loops that change it in several parts with collectives in
# between.


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


# ---------------------------------------------------------------- copy memory

# Memory for copies of a state that is on a GPU: kept for the next copy, and taken ahead.
#
# A GPU copies fast, and beside its kernels, only to memory that is pinned. To pin it takes 0.16 s
# for 1 GB with torch's threads for that, and 0.65 s without. So a thread does it while training
# goes on, and whoever can wait for it copies at a later step. What is copied, and when, is not
# decided here: the memory that a thread takes holds nothing yet.

logger = logging.getLogger(__name__)


class CopyMemory:
    """Hold the memory of one copy between two uses.

    One thread at a time calls ``is_ready`` and ``take``; any thread may ``put``.
    """

    def __init__(self) -> None:
        self._kept: Any = None
        self._coming: Future[Any] | None = None
        """What a thread is taking, together with what was kept before."""
        self._waits = True
        """Whether to wait for a thread: not once one has failed."""

    def is_ready(self, live: Callable[[], Any]) -> bool:
        """Return whether ``copy_to_cpu(live(), self.take())`` pins nothing. Otherwise let a thread
        take what is missing. Where that has failed, return True: the copy pins itself then.

        Raise BadTask for a state that cannot be copied.
        """
        if not self._waits or not on_gpu():
            return True
        if self._coming is not None and not self._coming.done():
            return False
        found, lacking = lacking_memory(live(), self.take())
        if not lacking:
            self.put(found)
        if not lacking or not self._waits:
            return True
        coming: Future[Any] = Future()
        self._coming = coming
        # Not a daemon: a process that ends waits for it, since CUDA must not end beside it.
        threading.Thread(
            target=_fill, args=(found, lacking, coming), name="copy-memory", daemon=False
        ).start()
        return False

    def take(self) -> Any:
        """Return the memory, for ``copy_to_cpu`` to use; None if there is none. Wait for a thread
        that is taking it."""
        coming, self._coming = self._coming, None
        if coming is not None:
            if (failed := coming.exception()) is None:
                return coming.result()
            logger.warning("no memory was pinned beside training: %s", failed)
            self._waits = False
        kept, self._kept = self._kept, None
        return kept

    def put(self, memory: Any) -> None:
        """Keep the memory of a copy that is not needed any more. That of one copy is kept."""
        self._kept = memory


def _fill(found: Any, lacking: list[TensorShape], coming: Future[Any]) -> None:
    """Complete ``found``. One tensor after the other: while memory is pinned, CUDA may hold up what
    other threads ask of it."""
    try:
        pinned = [new_memory(each.shape, each.dtype, pinned=True) for each in lacking]
        coming.set_result(put_together(found, pinned))
    except Exception as exc:
        coming.set_exception(exc)
