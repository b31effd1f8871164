"""Connections that several callers share: commits of SQLite, and the pool of PostgreSQL.

SQLite allows one writer at a time: writers that wait for another one share its commit.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import psycopg
from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.ext.asyncio import create_async_engine

T = TypeVar("T")
LONGEST_S: Final = 0.02
"""Maximum time that the first writer of a transaction waits for more of them."""
_LOOK_S: Final = 0.05
"""Interval at which a waiting writer checks whether the one that was to commit has gone away."""


class WriterTimeout(Exception):
    """Another writer held the database for too long."""


class _Group:
    """Writers of one transaction. Each writer after the first has a savepoint in it."""

    def __init__(self, engine: Engine) -> None:
        self.connection = engine.connect().execution_options(everstep_begin="BEGIN IMMEDIATE")
        try:
            self.transaction = self.connection.begin()
        except BaseException:
            self.connection.close()
            raise
        self.began_at = time.monotonic()
        self.num_writers = 0
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def commit(self) -> None:
        """End the transaction, and report the result to all waiting writers."""
        try:
            self.transaction.commit()
        except BaseException as exc:
            self.error = exc
            # SQLite still has the transaction open; closing the connection ends it.
            self.connection.invalidate()
        self._end()

    def abandon(self, error: BaseException) -> None:
        """Roll back the writes of all writers."""
        self.error = error
        try:
            self.transaction.rollback()
        except DBAPIError:
            self.connection.invalidate()
        self._end()

    def _end(self) -> None:
        try:
            self.connection.close()
        finally:
            self.ended.set()


class SharedCommits:
    """Serialises writers and lets them share commits.

    A commit waits for the disk, which takes longer than most writes. A writer that is done while
    others wait for their turn leaves the commit to the last of them, and returns once it has
    succeeded: no write is acknowledged before it is on the disk. A write that fails is rolled back
    alone; a commit that fails has failed for all its writers.
    """

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._turn = threading.Lock()
        self._counting = threading.Lock()
        self._num_waiting = 0
        self._open: _Group | None = None
        """Transaction that the writer with the next turn will commit."""
        self._own = threading.local()
        """The group of a thread that is inside ``together``."""

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a part of a transaction. It is committed when this returns, and rolled back if the
        block raises. Raises WriterTimeout.

        Inside ``together`` it is committed with the rest. If SQLite has rolled back the
        transaction, it raises that error.
        """
        own: _Group | None = getattr(self._own, "group", None)
        if own is None:
            with self._turn_of() as group, self._part(group):
                yield group.connection
            return
        if own.error is not None:
            raise own.error
        with self._part(own):
            yield own.connection

    @contextmanager
    def together(self) -> Iterator[Connection]:
        """Commit everything that this thread writes in the block at its end; a part that fails is
        rolled back alone.

        Raises WriterTimeout, and the commit's error: then nothing was written.
        """
        with self._turn_of() as group:
            # count the block itself, so that each of its parts gets a savepoint
            group.num_writers += 1
            self._own.group = group
            try:
                yield group.connection
            except BaseException as exc:
                if group.error is None:
                    self._abandon(group, exc)
                raise
            finally:
                self._own.group = None

    @contextmanager
    def _turn_of(self) -> Iterator[_Group]:
        """Take a turn to write; commit at its end, or wait for the commit."""
        self._take_turn()
        try:
            group = self._open = self._open or _Group(self._engine)
            yield group
        finally:
            self._end_turn()
        while not group.ended.wait(_LOOK_S):
            if self._turn.acquire(blocking=False):
                self._end_turn()
        if group.error is not None:
            raise group.error

    @contextmanager
    def _part(self, group: _Group) -> Iterator[None]:
        is_first = group.num_writers == 0
        group.num_writers += 1
        if not is_first:
            group.connection.exec_driver_sql("SAVEPOINT writer")
        try:
            yield
            if not is_first:
                group.connection.exec_driver_sql("RELEASE writer")
        except BaseException as exc:
            if is_first:
                self._abandon(group, exc)
            else:
                self._undo(group)
            raise

    def _undo(self, group: _Group) -> None:
        """Roll back the last writer's part, or everything if SQLite has lost the transaction, for
        example on a full disk."""
        try:
            group.connection.exec_driver_sql("ROLLBACK TO writer")
            group.connection.exec_driver_sql("RELEASE writer")
        except DBAPIError as exc:
            self._abandon(group, exc)

    def _abandon(self, group: _Group, error: BaseException) -> None:
        self._open = None
        group.abandon(error)

    def _take_turn(self) -> None:
        with self._counting:
            self._num_waiting += 1
        taken = self._turn.acquire(timeout=self._timeout_s)
        with self._counting:
            self._num_waiting -= 1
        if not taken:
            raise WriterTimeout

    def _end_turn(self) -> None:
        """Commit the open transaction, unless a waiting writer will."""
        try:
            group = self._open
            if group is not None and (
                self._num_waiting == 0 or time.monotonic() - group.began_at > LONGEST_S
            ):
                self._open = None
                group.commit()
        finally:
            self._turn.release()


# ---------------------------------------------------------------- postgresql

# Connections to PostgreSQL: their settings, the check of idle ones, and the event loop's own
# pool.

LOOKS: Final = 6
"""Maximum number of concurrent reads. With more, PostgreSQL's processes wait for one another and
the tail latency grows."""

WRITES: Final = 8

CONNECT_TIMEOUT_S: Final = 5

IDLE_S: Final = 1.0
"""A connection that was idle for this long is checked before use."""


def postgresql_connect_args(lock_timeout_ms: int) -> dict[str, Any]:
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
