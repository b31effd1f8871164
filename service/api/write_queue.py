"""Queue of writes on SQLite: one thread does all waiting writes in order, and commits them
together.

Separate threads would wait for one another, and for the interpreter lock, at every statement, some
of them many times longer than others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread

from service.db.engine import Database

T = TypeVar("T")

_MOST_TOGETHER: Final = 32
"""Maximum number of writes per commit, so that none waits for too many others."""


@dataclass(eq=False)
class _Write:
    call: Callable[[], Any]
    context: Context
    """Context of the request, with its audit entry."""
    done: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class WriteQueue:
    """The write queue of one event loop to a SQLite database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: deque[_Write] = deque()
        self._thread = anyio.CapacityLimiter(1)
        self._work: asyncio.Task[None] | None = None

    async def do(self, call: Callable[[], T]) -> T:
        """Run ``call``, which writes to the database, and return its result once its writes are on
        disk. Raises its errors, and DatabaseUnavailable."""
        write = _Write(call, copy_context(), asyncio.get_running_loop().create_future())
        self._waiting.append(write)
        if self._work is None:
            self._work = asyncio.create_task(self._do_all(), name="write-queue")
        result: T = await write.done
        return result

    async def _do_all(self) -> None:
        try:
            while self._waiting:
                writes = [
                    self._waiting.popleft() for _ in range(min(len(self._waiting), _MOST_TOGETHER))
                ]
                await anyio.to_thread.run_sync(self._do, writes, limiter=self._thread)
                for write in writes:
                    if write.done.done():  # the waiting request was cancelled
                        continue
                    if write.error is not None:
                        write.done.set_exception(write.error)
                    else:
                        write.done.set_result(write.result)
        finally:
            self._work = None

    def _do(self, writes: Sequence[_Write]) -> None:
        try:
            with self._database.together():
                for write in writes:
                    try:
                        write.result = write.context.run(write.call)
                    except Exception as exc:
                        write.error = exc
        except Exception as exc:
            for write in writes:
                write.error = write.error or exc
