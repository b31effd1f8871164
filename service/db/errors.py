"""Errors of the database, and the mapping of the driver's errors to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import DatabaseError as SqlDatabaseError
from sqlalchemy.exc import DataError, DBAPIError, OperationalError, SQLAlchemyError

from service.db.shared_commits import WriterTimeout

BUSY_TIMEOUT_MS: Final = 10_000
"""Maximum time that a write waits for another one."""


class DatabaseError(Exception):
    """Base class of the errors of this package.

    DatabaseError
    ├── DatabaseUnavailable        it cannot be opened or reached, or is locked for too long
    └── DatabaseOfAnotherVersion   its tables are not this version's, and cannot be made so
    """


class DatabaseUnavailable(DatabaseError):
    """The database cannot be opened or reached now. A retry may succeed."""


class DatabaseOfAnotherVersion(DatabaseError):
    """The tables are of a version of Everstep that this one does not know."""


class Unstorable(ValueError):
    """A value that no column can store or be compared with. The database is fine, and a retry does
    not help."""


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
        if exc.connection_invalidated or type(exc) is SqlDatabaseError:
            raise DatabaseUnavailable(str(exc.orig)) from exc
        raise
    except SQLAlchemyError as exc:
        if type(exc).__name__ == "TimeoutError":
            raise DatabaseUnavailable("no connection became free in time") from exc
        raise
