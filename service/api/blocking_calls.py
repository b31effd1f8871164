"""Where blocking calls run: threads for the database, threads for storage, the event loop for short
reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, ParamSpec, TypeVar

import anyio
import anyio.to_thread

from service.api.write_queue import WriteQueue
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
