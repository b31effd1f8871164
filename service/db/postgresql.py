"""Connections to PostgreSQL: what each is told, when one is tried out, and those that the event
loop waits for itself."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import psycopg
from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import create_async_engine

T = TypeVar("T")

LOOKS: Final = 6
"""So many looks at a time: more of them make PostgreSQL's processes wait for one another, and the
slowest wait longest."""
WRITES: Final = 8
CONNECT_TIMEOUT_S: Final = 5
IDLE_S: Final = 1.0
"""After so long without use a connection is tried out before it is used again."""


def connect_args(lock_timeout_ms: int) -> dict[str, Any]:
    """What every connection is made with."""
    return {
        "connect_timeout": CONNECT_TIMEOUT_S,
        # A server that was cut off must not hold a request for the hours that TCP would wait.
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": 15_000,
        # Nor may a replica that stands still in the middle of a transaction keep its locks, and
        # with them the lease.
        "options": f"-c lock_timeout={lock_timeout_ms} -c idle_in_transaction_session_timeout=4000",
    }


def try_out_idle(engine: Engine) -> None:
    """Have this engine's connections tried out that were not used for a while."""
    event.listen(engine, "checkin", _note_use)
    event.listen(engine, "checkout", _try_out)


def _note_use(_connection: object, record: Any) -> None:
    record.info["used_at"] = time.monotonic()


def _try_out(connection: Any, record: Any, _proxy: object) -> None:
    """See that a connection that was not used for a while still is one; the pool makes another
    where it is not.

    One that was used just now is not asked, which would cost each request a question of its own.
    """
    if time.monotonic() - record.info.get("used_at", math.inf) < IDLE_S:
        return
    alone = connection.autocommit
    try:
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute("SELECT 1")
        cursor.close()
        connection.autocommit = alone
    except psycopg.Error as exc:
        raise DisconnectionError from exc


class LoopConnections:
    """A pool for one event loop, whose requests have their turns in the order in which they
    came."""

    def __init__(self, url: URL, options: Mapping[str, Any]) -> None:
        """``options`` are those of an engine."""
        self._engine = create_async_engine(
            url,
            pool_size=LOOKS + WRITES,
            max_overflow=0,
            # nothing is left open: every statement outside of ``transaction`` stands alone
            pool_reset_on_return=None,
            isolation_level="AUTOCOMMIT",
            **options,
        )
        try_out_idle(self._engine.sync_engine)
        self._looks, self._writes = asyncio.Semaphore(LOOKS), asyncio.Semaphore(WRITES)

    async def run(self, call: Callable[[Connection], T], *, writes: bool) -> T:
        """What ``call`` returns, which is written as if its connection blocked."""
        async with self._writes if writes else self._looks, self._engine.connect() as connection:
            return await connection.run_sync(call)

    async def close(self) -> None:
        await self._engine.dispose()


@contextmanager
def transaction(connection: Connection) -> Iterator[Connection]:
    """A transaction on one of these connections, committed at the block's end, undone when it
    raises."""
    connection.execution_options(isolation_level="READ COMMITTED")
    try:
        with connection.begin():
            yield connection
    finally:
        if not connection.invalidated:
            connection.execution_options(isolation_level="AUTOCOMMIT")
