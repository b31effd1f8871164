"""Connections to SQLite in WAL mode or PostgreSQL, behind one small object."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from psycopg import Error as PsycopgError
from psycopg.errors import ReadOnlySqlTransaction
from pydantic_core import from_json, to_json
from sqlalchemy import Connection, Dialect, Select, Table, create_engine, event, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import Insert as PostgresInsert
from sqlalchemy.dialects.sqlite import Insert as SqliteInsert
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DatabaseError as SqlDatabaseError
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    OperationalError,
    SQLAlchemyError,
)

from service.db.tables import TableHooks

T = TypeVar("T")

MIGRATIONS: Final = Path(__file__).parent / "migrations"
POOL_SIZE: Final = 8
_MIGRATION_LOCK: Final = 0x65766572_73746570
"""Key of PostgreSQL's advisory lock for migrations: two replicas may start at the same time."""

Guard = Callable[[Connection], None]
"""Called at the start of every write; raises to refuse it."""
Companion = Callable[[Connection], Callable[[], None] | None]
"""Called at the end of every write, to write additional rows; returns a function to call after the
commit."""


class Database:
    """A database shared by readers and writers.

    On SQLite every write is one ``BEGIN IMMEDIATE`` transaction, so what it read cannot change
    before it commits. On PostgreSQL the run's row lock has this effect. With ``synchronous=FULL``
    an acknowledged request survives a power cut, not only the death of the process.
    """

    def __init__(self, url: str, hooks: Sequence[TableHooks] = ()) -> None:
        """Open without connecting.

        Args:
            url: SQLAlchemy URL, for example ``sqlite:////home/me/.everstep/everstep.db`` or
                ``postgresql+psycopg://me@db/everstep``.
            hooks: what annexes do in transactions of the core.

        Raises DatabaseError for a URL of an unsupported database.
        """
        self.url: Final[URL] = checked_url(url)
        self.is_sqlite: Final = self.url.get_backend_name() == "sqlite"
        self.hooks: Final = tuple(hooks)
        self.companion: Companion | None = None
        self._guard: Guard | None = None
        self._engine = create_engine(
            self.url,
            pool_size=POOL_SIZE,
            # A SQLite connection is an open file: nobody, least of all the event loop, should wait
            # for one.
            max_overflow=-1 if self.is_sqlite else POOL_SIZE,
            pool_pre_ping=not self.is_sqlite,
            json_serializer=encoded,
            json_deserializer=from_json,
            connect_args={} if self.is_sqlite else POSTGRESQL_CONNECT_ARGS,
        )
        # SQLite allows one writer at a time. A lock wakes its waiter at once; SQLite's own busy
        # handler, which waits for other processes, polls.
        self._writer = threading.Lock()
        self._own = threading.local()
        """Thread-local: the connection of the current ``reading`` transaction."""
        if self.is_sqlite:
            event.listen(self._engine, "connect", _configure_sqlite)
            event.listen(self._engine, "begin", _begin_sqlite)

    def migrate(self) -> None:
        """Create or upgrade the tables to the newest version. Raises DatabaseUnavailable, and
        DatabaseOfAnotherVersion for tables that this version does not know."""
        if self.is_sqlite and self.url.database not in (None, "", ":memory:"):
            try:
                Path(str(self.url.database)).parent.mkdir(parents=True, exist_ok=True)
            except OSError as exc:
                raise DatabaseUnavailable(
                    f"cannot create the directory of {self.url.database}: {exc}"
                ) from exc
        with self.write() as connection:
            if not self.is_sqlite:
                # On a busy machine Python may be slow between two statements, and so may another
                # replica's migration. Table locks keep their short timeout, since others queue
                # behind them.
                connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = '60s'"))
                connection.execute(text("SET LOCAL lock_timeout = '60s'"))
                connection.execute(
                    text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK}
                )
                connection.execute(text(f"SET LOCAL lock_timeout = {BUSY_TIMEOUT_MS}"))
            config = Config()
            config.set_main_option("script_location", str(MIGRATIONS))
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as exc:
                shown = self.url.render_as_string(hide_password=True)
                raise DatabaseOfAnotherVersion(
                    f"the tables of {shown} are of a version of Everstep that this one does not "
                    f"know ({exc}). Nothing was changed. Start the version that wrote them, or "
                    "name another database and another storage and begin anew; the checkpoints "
                    "stay as files in the storage (docs/runbook.md, Upgrade)"
                ) from exc

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a transaction that sees one snapshot and writes nothing. A nested read in the same
        thread joins it."""
        begun: Connection | None = getattr(self._own, "reading", None)
        if begun is not None:
            yield begun
            return
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
    def write(self) -> Iterator[Connection]:
        """Open a transaction that is committed at the end of the block, and rolled back if it
        raises."""
        with mapped_errors():
            with self._transaction() as connection:
                if self._guard is not None:
                    self._guard(connection)
                yield connection
                committed = self.companion(connection) if self.companion is not None else None
            if committed is not None:
                committed()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        if not self.is_sqlite:
            with self._engine.begin() as connection:
                yield connection
            return
        if not self._writer.acquire(timeout=BUSY_TIMEOUT_MS / 1000):
            raise WriterTimeout
        try:
            with self._engine.connect() as connection:
                alone = connection.execution_options(everstep_begin="BEGIN IMMEDIATE")
                with alone.begin():
                    yield alone
        finally:
            self._writer.release()

    def guarded(self, guard: Guard) -> Database:
        """Return the same database with ``guard`` at the start of every write."""
        other = copy.copy(self)
        other._guard = guard
        return other

    def probe(self) -> None:
        """Raise DatabaseUnavailable if the database does not respond."""
        with self.read() as connection:
            connection.execute(text("SELECT 1 FROM runs LIMIT 1"))

    def close(self) -> None:
        self._engine.dispose()


class Store:
    """What the stores of tables share. ``clock`` returns unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self.clock = clock

    def _rows(self, kind: Callable[..., T], query: Select[Any]) -> list[T]:
        """Return the rows of a query that ``kind.select`` has begun."""
        with self._database.read() as connection:
            return [kind(*row) for row in connection.execute(query)]


def checked_url(url: str) -> URL:
    """Return the database's URL with the driver to use. Raise DatabaseError for an unsupported
    database."""
    try:
        found = make_url(url)
    except SQLAlchemyError as exc:
        raise DatabaseError(
            "the database URL is invalid; use sqlite:///PATH or postgresql+psycopg://…"
        ) from exc
    # whatever driver the URL names
    drivers = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite"}
    if (backend := found.get_backend_name()) not in drivers:
        raise DatabaseError(
            f"{backend} is not supported; use sqlite:///PATH or postgresql+psycopg://…"
        )
    return found.set(drivername=drivers[backend])


def _configure_sqlite(connection: Any, _record: object) -> None:
    # None: the driver starts no transactions; _begin_sqlite does.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA cache_size=-8192")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    options = connection.get_execution_options()
    connection.exec_driver_sql(options.get("everstep_begin", "BEGIN"))


def encoded(value: Any) -> str:
    """Return the JSON for a column; numbers that are not finite become null."""
    return to_json(value, inf_nan_mode="null").decode()


# ---------------------------------------------------------------- postgresql

# Settings of connections to PostgreSQL.

CONNECT_TIMEOUT_S: Final = 5

BUSY_TIMEOUT_MS: Final = 10_000
"""Maximum time that a write waits for another one."""

POSTGRESQL_CONNECT_ARGS: Final[Mapping[str, Any]] = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    # Without it, a database with the encoding SQL_ASCII returns bytes for text.
    "client_encoding": "utf8",
    # TCP alone would wait for hours for a server that is cut off.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
    # Of several hosts in the URL, the one that is no standby.
    "target_session_attrs": "read-write",
    # A replica that hangs inside a transaction must not keep its locks, and so the lease.
    "options": f"-c lock_timeout={BUSY_TIMEOUT_MS} -c idle_in_transaction_session_timeout=4000",
}


# ---------------------------------------------------------------- conflicts

# Inserts that may conflict with another replica: the database resolves them, and neither fails.


def insert_missing(connection: Connection, table: Table, row: Mapping[str, Any]) -> bool:
    """Insert a row unless its key exists; return whether it was inserted.

    Waits for a transaction that inserts the same key, and respects its commit.
    """
    statement = insert_into(table, connection.dialect).values(dict(row)).on_conflict_do_nothing()
    done = connection.execute(statement, execution_options={"preserve_rowcount": True})
    return done.rowcount > 0


def replace_rows(connection: Connection, table: Table, *rows: Mapping[str, Any]) -> None:
    """Insert rows with the same columns, each in place of one with the same primary key. Of two at
    once, the later one stays."""
    statement = insert_into(table, connection.dialect)
    keys = [column.name for column in table.primary_key]
    replaced = {name: statement.excluded[name] for name in rows[0] if name not in keys}
    connection.execute(
        statement.on_conflict_do_update(index_elements=keys, set_=replaced), list(map(dict, rows))
    )


def insert_into(table: Table, dialect: Dialect) -> PostgresInsert | SqliteInsert:
    """Return an insert with conflict handling, in the database's dialect."""
    if dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


# ---------------------------------------------------------------- errors

# Errors of the database, and the mapping of the driver's errors to them.


class DatabaseError(Exception):
    """Base class of the errors of this package.

    DatabaseError
    ├── DatabaseUnavailable        it cannot be opened or reached, or is locked for too long
    ├── DatabaseOfAnotherVersion   its tables are not this version's, and cannot be made so
    └── StateConflict              what is stored does not allow the request
    """


class DatabaseUnavailable(DatabaseError):
    """The database cannot be opened or reached now. A retry may succeed."""


class DatabaseOfAnotherVersion(DatabaseError):
    """The tables are of a version of Everstep that this one does not know."""


class StateConflict(DatabaseError):
    """What is stored is in a state that does not allow the request."""


class Unstorable(ValueError):
    """A value that no column can store or be compared with. The database is fine, and a retry does
    not help."""


class WriterTimeout(Exception):
    """Another writer held the database for too long."""


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Raise the driver's errors as ours. Integrity errors and bugs pass unchanged."""
    try:
        yield
    except WriterTimeout as exc:
        raise DatabaseUnavailable(
            f"another writer held the database for more than {BUSY_TIMEOUT_MS / 1000:.0f} s"
        ) from exc
    except OperationalError as exc:
        raise DatabaseUnavailable(str(exc.orig)) from exc
    except DataError as exc:
        raise Unstorable(str(exc.orig)) from exc
    except DBAPIError as exc:
        # SQLite raises the base class itself for a file that is damaged or not a database.
        # A PostgreSQL that became a standby takes no writes.
        is_away = type(exc) is SqlDatabaseError or isinstance(exc.orig, ReadOnlySqlTransaction)
        if exc.connection_invalidated or is_away:
            raise DatabaseUnavailable(str(exc.orig)) from exc
        raise
    except SQLAlchemyError as exc:
        if type(exc).__name__ == "TimeoutError":
            raise DatabaseUnavailable("no connection became free in time") from exc
        raise
    except PsycopgError as exc:
        # SQLAlchemy passes these on unchanged where it sets up a connection that was cut off.
        raise DatabaseUnavailable(str(exc)) from exc
