"""Work that blocks, away from the event loop: calls of database and storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, ParamSpec, TypeVar

import anyio
import anyio.to_thread

from service.model.rows import EventRow
from service.projections.handlers import folded

P = ParamSpec("P")
T = TypeVar("T")

_DATABASE_THREADS: Final = 8
_STORAGE_THREADS: Final = 8
_LONG_STORAGE_THREADS: Final = 2
_FOLD_THREADS: Final = 2


class BlockingCalls:
    """Runs blocking calls for request handlers.

    Storage has its own threads, so that a hanging storage does not block the database.
    """

    def __init__(self) -> None:
        self._database_threads = anyio.CapacityLimiter(_DATABASE_THREADS)
        self._writing_threads = anyio.CapacityLimiter(_DATABASE_THREADS)
        self._storage_threads = anyio.CapacityLimiter(_STORAGE_THREADS)
        self._long_storage_threads = anyio.CapacityLimiter(_LONG_STORAGE_THREADS)
        self._fold_threads = anyio.CapacityLimiter(_FOLD_THREADS)

    async def database_call(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a store's method that only reads in a thread."""
        return await anyio.to_thread.run_sync(
            partial(call, *args, **kwargs), limiter=self._database_threads
        )

    async def database_write(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a store's method that writes in a thread. Writers wait for each other, readers never
        wait for them: each kind has its own threads, and a connection for each of these."""
        return await anyio.to_thread.run_sync(
            partial(call, *args, **kwargs), limiter=self._writing_threads
        )

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

    async def folded(self, fold: Callable[[list[EventRow]], T], rows: Iterable[EventRow]) -> T:
        """Return ``handlers.folded`` of a run's events. A history may be so long that it takes
        seconds: it holds neither the event loop nor a connection of the database."""
        return await anyio.to_thread.run_sync(folded, fold, rows, limiter=self._fold_threads)
