"""Work that is repeated beside the reconciler's ticks, never twice at a time: what hangs in it does
not hold up a tick."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class Background:
    """Repeats ``work`` every ``interval_s`` seconds, counted from one beginning to the next."""

    def __init__(self, interval_s: float, work: Callable[[], Awaitable[None]]) -> None:
        self._interval_s = interval_s
        self._work = work
        self._task: asyncio.Future[None] | None = None
        self._began_at = float("-inf")

    def tick(self) -> None:
        """Begin the work where it is due. Raises what it raised the last time."""
        if self._task is not None:
            if not self._task.done():
                return
            task, self._task = self._task, None
            task.result()
        if time.monotonic() - self._began_at >= self._interval_s:
            self._began_at = time.monotonic()
            self._task = asyncio.ensure_future(self._work())

    async def close(self) -> None:
        """Stop what is under way; any part of it may be repeated by the next process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
