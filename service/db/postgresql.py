"""Connections to PostgreSQL: their settings, the check of idle ones, and the event loop's own
pool."""

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
"""Maximum number of concurrent reads. With more, PostgreSQL's processes wait for one another and
the tail latency grows."""
WRITES: Final = 8
CONNECT_TIMEOUT_S: Final = 5
IDLE_S: Final = 1.0
"""A connection that was idle for this long is checked before use."""


def connect_args(lock_timeout_ms: int) -> dict[str, Any]:
    """Return the arguments of every connection."""
    return {
        "connect_timeout": CONNECT_TIMEOUT_S,
        # Without it, a database with the encoding SQL_ASCII returns bytes for text.
        "client_encoding": "utf8",
        # TCP alone would wait for hours for a server that is cut off.
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": 15_000,
        # A replica that hangs inside a transaction must not keep its locks, and so the lease.
        "options": f"-c lock_timeout={lock_timeout_ms} -c idle_in_transaction_session_timeout=4000",
    }


def try_out_idle(engine: Engine) -> None:
    """Check this engine's connections before use if they were idle for a while."""
    event.listen(engine, "checkin", _note_use)
    event.listen(engine, "checkout", _try_out)


def _note_use(_connection: object, record: Any) -> None:
    record.info["used_at"] = time.monotonic()


def _try_out(connection: Any, record: Any, _proxy: object) -> None:
    """Check a connection that was idle for a while; the pool replaces a broken one.

    One that was just used is not checked: that would add a round trip to each request.
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
    """A connection pool for one event loop, which serves requests in the order of arrival."""

    def __init__(self, url: URL, options: Mapping[str, Any]) -> None:
        """``options`` are those of an engine."""
        self._engine = create_async_engine(
            url,
            pool_size=LOOKS + WRITES,
            max_overflow=0,
            # autocommit leaves nothing open outside of ``transaction``
            pool_reset_on_return=None,
            isolation_level="AUTOCOMMIT",
            **options,
        )
        try_out_idle(self._engine.sync_engine)
        self._looks, self._writes = asyncio.Semaphore(LOOKS), asyncio.Semaphore(WRITES)

    async def run(self, call: Callable[[Connection], T], *, writes: bool) -> T:
        """Run ``call``, which is written as if its connection blocked, and return its result."""
        async with self._writes if writes else self._looks, self._engine.connect() as connection:
            return await connection.run_sync(call)

    async def close(self) -> None:
        await self._engine.dispose()


@contextmanager
def transaction(connection: Connection) -> Iterator[Connection]:
    """Open a transaction on such a connection: committed at the end of the block, rolled back if it
    raises."""
    connection.execution_options(isolation_level="READ COMMITTED")
    try:
        with connection.begin():
            yield connection
    finally:
        if not connection.invalidated:
            connection.execution_options(isolation_level="AUTOCOMMIT")
