"""Work that repeats beside the reconciler's ticks, one run at a time. If it hangs, ticks go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class Background:
    """Repeats ``work`` every ``interval_s`` seconds, from start to start."""

    def __init__(self, interval_s: float, work: Callable[[], Awaitable[None]]) -> None:
        self._interval_s = interval_s
        self._work = work
        self._task: asyncio.Future[None] | None = None
        self._began_at = float("-inf")

    def tick(self) -> None:
        """Start the work if it is due. Raises the error of the previous time."""
        if self._task is not None:
            if not self._task.done():
                return
            task, self._task = self._task, None
            task.result()
        if time.monotonic() - self._began_at >= self._interval_s:
            self._began_at = time.monotonic()
            self._task = asyncio.ensure_future(self._work())

    async def close(self) -> None:
        """Cancel running work. The next process may repeat any part of it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
