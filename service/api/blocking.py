"""Work that blocks, away from the event loop: calls of database and storage, and a queue of
writes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import anyio
import anyio.to_thread

from service.db.engine import Database

P = ParamSpec("P")
T = TypeVar("T")

_DATABASE_THREADS: Final = 8
_STORAGE_THREADS: Final = 8
_LONG_STORAGE_THREADS: Final = 2


class BlockingCalls:
    """Runs blocking calls for request handlers.

    Storage has its own threads, so that a hanging storage does not block the database.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._database_threads = anyio.CapacityLimiter(_DATABASE_THREADS)
        self._storage_threads = anyio.CapacityLimiter(_STORAGE_THREADS)
        self._long_storage_threads = anyio.CapacityLimiter(_LONG_STORAGE_THREADS)
        self._writes = WriteQueue(database)

    async def database_call(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a store's method in a thread."""
        return await anyio.to_thread.run_sync(
            partial(call, *args, **kwargs), limiter=self._database_threads
        )

    async def database_lookup(
        self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a store's method in the event loop. For reads of a few rows through an index."""
        return await self._database.do_in_loop(partial(call, *args, **kwargs))

    async def database_write(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a store's method that reads and writes, for routes with many concurrent requests.

        SQLite runs such methods in one thread, with one commit for all that wait.
        """
        if self._database.is_sqlite:
            return await self._writes.do(partial(call, *args, **kwargs))
        return await self._database.do_in_loop(partial(call, *args, **kwargs), writes=True)

    async def storage_call(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that reads or writes storage in a thread."""
        return await anyio.to_thread.run_sync(
            partial(call, *args, **kwargs), limiter=self._storage_threads
        )

    async def long_storage_call(
        self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a call that reads or deletes as much as a run has, which may take minutes. Two run at
        a time, so that short calls always find a thread."""
        return await anyio.to_thread.run_sync(
            partial(call, *args, **kwargs), limiter=self._long_storage_threads
        )


# ---------------------------------------------------------------- write queue

# Queue of writes on SQLite: one thread does all waiting writes in order, and commits them
# together.
#
# Separate threads would wait for one another, and for the interpreter lock, at every statement,
# some of them many times longer than others.

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
