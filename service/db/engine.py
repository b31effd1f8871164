"""Connections: SQLite in WAL mode or PostgreSQL behind one small object, migrated when it is
opened."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from alembic import command
from alembic.config import Config
from pydantic_core import from_json, to_json
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import SQLAlchemyError

from service.db import postgresql
from service.db.errors import BUSY_TIMEOUT_MS, DatabaseError, DatabaseUnavailable, mapped_errors
from service.db.shared_commits import SharedCommits

T = TypeVar("T")

MIGRATIONS: Final = Path(__file__).parent / "migrations"
POOL_SIZE: Final = 8
_MIGRATION_LOCK: Final = 0x65766572_73746570
"""Key of PostgreSQL's advisory lock under which tables are changed: two replicas may start at the
same moment."""

Guard = Callable[[Connection], None]
"""Called at the beginning of every write; raises where it must not happen."""
Companion = Callable[[Connection], Callable[[], None] | None]
"""Called at the end of every write, to write what belongs to it; returns what to call once all of
it is committed."""


class Database:
    """A database that readers and writers share.

    Every write is one ``BEGIN IMMEDIATE`` transaction on SQLite, so that what it read cannot change
    before it commits; PostgreSQL gets the same from the run's row lock. ``synchronous=FULL`` makes
    an acknowledged request survive a power cut, not only the death of the process.
    """

    def __init__(self, url: str) -> None:
        """Open without connecting.

        Args:
            url: SQLAlchemy URL, for example ``sqlite:////home/me/.everstep/everstep.db`` or
                ``postgresql+psycopg://me@db/everstep``.

        Raises DatabaseError for a URL that names no database that is served.
        """
        self.url: Final[URL] = checked_url(url)
        self.is_sqlite: Final = self.url.get_backend_name() == "sqlite"
        self.companion: Companion | None = None
        self._guard: Guard | None = None
        self._engine = create_engine(
            self.url,
            pool_size=POOL_SIZE,
            # On SQLite a connection is an open file: nobody, least of all the event loop, is to
            # wait for one.
            max_overflow=-1 if self.is_sqlite else POOL_SIZE,
            **self._options(),
        )
        # SQLite has one writer at a time. Waiting on a lock wakes at once; its own busy handler
        # sleeps and races.
        self._shared_commits = (
            SharedCommits(self._engine, BUSY_TIMEOUT_MS / 1000) if self.is_sqlite else None
        )
        self._own = threading.local()
        """Of a thread: ``reading``, the connection of the transaction that it reads in;
        ``committed``, what it calls later."""
        self._looking: ContextVar[Connection | None] = ContextVar("looking", default=None)
        """The connection of the looks of a thread; of a request in the event loop also that of what
        it writes."""
        self._loop: postgresql.LoopConnections | None = None
        if self.is_sqlite:
            event.listen(self._engine, "connect", _configure_sqlite)
            event.listen(self._engine, "begin", _begin_sqlite)
        else:
            postgresql.try_out_idle(self._engine)

    def _options(self) -> dict[str, Any]:
        connect_args = {} if self.is_sqlite else postgresql.connect_args(BUSY_TIMEOUT_MS)
        return {
            "json_serializer": encoded,
            "json_deserializer": from_json,
            "connect_args": connect_args,
        }

    def migrate(self) -> None:
        """Create or upgrade the tables to the newest version. Raises DatabaseUnavailable."""
        if self.is_sqlite and self.url.database not in (None, "", ":memory:"):
            try:
                Path(str(self.url.database)).parent.mkdir(parents=True, exist_ok=True)
            except OSError as exc:
                raise DatabaseUnavailable(
                    f"cannot create the directory of {self.url.database}: {exc}"
                ) from exc
        with self.write() as connection:
            if not self.is_sqlite:
                # It is Python that a migration waits for between two statements, and on a busy
                # machine both it and another replica's migration before it take long. Locks of
                # tables are waited for no longer than ever: others queue behind.
                connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = '60s'"))
                connection.execute(text("SET LOCAL lock_timeout = '60s'"))
                connection.execute(
                    text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK}
                )
                connection.execute(text(f"SET LOCAL lock_timeout = {BUSY_TIMEOUT_MS}"))
            config = Config()
            config.set_main_option("script_location", str(MIGRATIONS))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that sees one snapshot and writes nothing. A read within a read, in the
        same thread, is part of it."""
        begun: Connection | None = getattr(self._own, "reading", None)
        if begun is not None:
            yield begun
            return
        assert self._of_loop() is None, "a read in the event loop would hold it up"
        with mapped_errors(), self._engine.connect() as connection:
            if not self.is_sqlite:
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                self._own.reading = connection
                try:
                    yield connection
                finally:
                    self._own.reading = None

    @contextmanager
    def look(self) -> Iterator[Connection]:
        """For statements that read, each at its own moment: a transaction costs more than they do.

        Within a read it is part of that, within a look it has the same connection.
        """
        begun: Connection | None = getattr(self._own, "reading", None) or self._looking.get()
        if begun is not None:
            yield begun
            return
        with mapped_errors(), self._engine.connect() as connection:
            alone = (
                {"everstep_begin": None} if self.is_sqlite else {"isolation_level": "AUTOCOMMIT"}
            )
            with self._looking_on(connection.execution_options(**alone)) as looking:
                yield looking

    @contextmanager
    def _looking_on(self, connection: Connection) -> Iterator[Connection]:
        before = self._looking.set(connection)
        try:
            yield connection
        finally:
            self._looking.reset(before)

    def _of_loop(self) -> Connection | None:
        """The connection that the event loop waits for, where it is the loop that asks."""
        looking = self._looking.get()
        return looking if looking is not None and looking.dialect.is_async else None

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that is committed when the block has ended, and undone when it raises.

        On SQLite several threads' may be committed at once (shared_commits.py).
        """
        with mapped_errors():
            with self._transaction() as connection:
                if self._guard is not None:
                    self._guard(connection)
                yield connection
                committed = self.companion(connection) if self.companion is not None else None
            later: list[Callable[[], None]] | None = getattr(self._own, "committed", None)
            if committed is not None and later is not None:
                later.append(committed)
            elif committed is not None:
                committed()

    def _transaction(self) -> AbstractContextManager[Connection]:
        of_loop = self._of_loop()
        if of_loop is not None:
            return postgresql.transaction(of_loop)
        return (
            self._engine.begin() if self._shared_commits is None else self._shared_commits.write()
        )

    @contextmanager
    def together(self) -> Iterator[None]:
        """One commit, at the block's end, for all that this thread writes in it: on SQLite only.

        A write that fails is undone alone. Reads in the block see what was written before. Where
        the commit fails, nothing of it was written, and this raises what ``write`` would.
        """
        assert self._shared_commits is not None
        called_later: list[Callable[[], None]] = []
        with mapped_errors(), self._shared_commits.together() as connection:
            self._own.reading, self._own.committed = connection, called_later
            try:
                yield
            finally:
                self._own.reading, self._own.committed = None, None
        for call in called_later:
            call()

    async def do_in_loop(self, call: Callable[[], T], *, writes: bool = False) -> T:
        """What ``call`` returns, which looks, or writes, but does not read, in the event loop's own
        thread.

        Only where that waits for nobody (SQLite's looks), or goes on with others meanwhile
        (PostgreSQL): threads wait for one another, and for the interpreter.
        """
        if self.is_sqlite:
            assert not writes, "a commit would hold up the event loop"
            return call()
        if self._loop is None:
            self._loop = postgresql.LoopConnections(self.url, self._options())
        with mapped_errors():
            return await self._loop.run(partial(self._call_on, call), writes=writes)

    def _call_on(self, call: Callable[[], T], connection: Connection) -> T:
        with self._looking_on(connection):
            return call()

    async def close_loop(self) -> None:
        """Close what ``do_in_loop`` opened, in the event loop that it was called in."""
        loop, self._loop = self._loop, None
        if loop is not None:
            await loop.close()

    def guarded(self, guard: Guard) -> Database:
        """The same database, whose every write begins with ``guard``."""
        other = copy.copy(self)
        other._guard = guard
        return other

    def probe(self) -> None:
        """Raises DatabaseUnavailable where the database does not answer."""
        with self.read() as connection:
            connection.execute(text("SELECT 1 FROM runs LIMIT 1"))

    def close(self) -> None:
        self._engine.dispose()


def checked_url(url: str) -> URL:
    """Where a database is, with the driver that is used. Raises DatabaseError for one that is not
    served."""
    try:
        found = make_url(url)
    except SQLAlchemyError as exc:
        raise DatabaseError(
            "that is not a database's URL; give sqlite:///PATH or postgresql+psycopg://…"
        ) from exc
    # whatever driver the URL names
    drivers = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite"}
    if (backend := found.get_backend_name()) not in drivers:
        raise DatabaseError(
            f"{backend} is not served; give sqlite:///PATH or postgresql+psycopg://…"
        )
    return found.set(drivername=drivers[backend])


def _configure_sqlite(connection: Any, _record: object) -> None:
    # None: the driver starts no transaction of its own; _begin_sqlite says which kind.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA cache_size=-8192")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    statement = connection.get_execution_options().get("everstep_begin", "BEGIN")
    if statement is not None:
        connection.exec_driver_sql(statement)


def encoded(value: Any) -> str:
    """What a column of JSON is given; what is no number is null there."""
    return to_json(value, inf_nan_mode="null").decode()
