"""Memory for copies of a state that is on a GPU: kept for the next copy, and taken ahead.

A GPU copies fast, and beside its kernels, only to memory that is pinned. To pin it takes 0.16 s for
1 GB with torch's threads for that, and 0.65 s without. So a thread does it while training goes on,
and whoever can wait for it copies at a later step. What is copied, and when, is not decided here:
the memory that a thread takes holds nothing yet.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from train_fn.state.tensor_tree import TensorShape, lacking_memory, new_memory, on_gpu, put_together

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
