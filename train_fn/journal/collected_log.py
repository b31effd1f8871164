"""Collect the log lines of a process for another one that asks for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque

MAX_LINES = 100_000
"""Lines kept until they are taken. Beyond it the oldest are dropped."""


class CollectedLog(logging.Handler):
    """Keep the lines of loggers, from any thread, until they are taken."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[tuple[int, str]] = deque(maxlen=MAX_LINES)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._some = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.levelno, self.format(record)))
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                self._loop.call_soon_threadsafe(self._some.set)

    async def take(self, patience_s: float) -> list[tuple[int, str]]:
        """Return level and text of each line since the last call. If there is none, wait up to
        ``patience_s`` seconds for one.

        Call this from one event loop only.
        """
        self._loop = asyncio.get_running_loop()
        self._some.clear()
        if not self._lines:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._some.wait(), patience_s)
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        return lines


def collect_log(*names: str) -> CollectedLog:
    """Collect the lines of loggers of these names from now on."""
    collected = CollectedLog()
    for name in names:
        log = logging.getLogger(name)
        log.addHandler(collected)
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)
    return collected
