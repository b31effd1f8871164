"""Work that blocks, away from the event loop: calls of database and storage.

Each kind has its own threads, so that a hanging storage does not block the database, and writers,
which wait for each other, do not keep readers waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Final, ParamSpec, TypeVar

import anyio
import anyio.to_thread

from service.db.events import EventStore
from service.model.rows import EventRow
from service.projections import handlers

P = ParamSpec("P")
T = TypeVar("T")

READERS: Final = anyio.CapacityLimiter(4)
"""More would only wait for each other, for the interpreter's lock: lists take a quarter longer."""
WRITERS: Final = anyio.CapacityLimiter(8)
STORAGE: Final = anyio.CapacityLimiter(8)
LONG_STORAGE: Final = anyio.CapacityLimiter(2)
FOLDS: Final = anyio.CapacityLimiter(2)


async def db_read(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a store's method that only reads in a thread."""
    return await anyio.to_thread.run_sync(partial(call, *args, **kwargs), limiter=READERS)


async def db_write(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a store's method that writes in a thread."""
    return await anyio.to_thread.run_sync(partial(call, *args, **kwargs), limiter=WRITERS)


async def storage_call(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that reads or writes storage in a thread."""
    return await anyio.to_thread.run_sync(partial(call, *args, **kwargs), limiter=STORAGE)


async def long_storage_call(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call that reads or deletes as much as a run has, which may take minutes. Two run at a
    time, so that short calls always find a thread."""
    return await anyio.to_thread.run_sync(partial(call, *args, **kwargs), limiter=LONG_STORAGE)


async def folded(fold: Callable[[list[EventRow]], T], rows: Iterable[EventRow]) -> T:
    """Return ``handlers.folded`` of a run's events. A history may be so long that it takes seconds:
    it holds neither the event loop nor a connection of the database."""
    return await anyio.to_thread.run_sync(handlers.folded, fold, rows, limiter=FOLDS)


async def of_history(
    events: EventStore,
    run_id: str,
    kinds: Collection[str],
    fold: Callable[[list[EventRow]], T],
) -> T:
    """Return ``folded`` of a run's events of these kinds."""
    return await folded(fold, await db_read(events.of_kinds, run_id, kinds))
