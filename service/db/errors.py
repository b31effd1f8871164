"""Errors of the database: the one place where the driver's errors become ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import DatabaseError as SqlDatabaseError
from sqlalchemy.exc import DataError, DBAPIError, OperationalError, SQLAlchemyError

from service.db.shared_commits import WriterTimeout

BUSY_TIMEOUT_MS: Final = 10_000
"""How long a write waits for another one."""


class DatabaseError(Exception):
    """Base of the errors of this package.

    DatabaseError
    └── DatabaseUnavailable   it cannot be opened or reached, or is locked for too long
    """


class DatabaseUnavailable(DatabaseError):
    """The database cannot be opened or reached now; the same call may succeed later."""


class Unstorable(ValueError):
    """A value that no column can hold, or be compared with: nothing is wrong with the database, and
    asking again is no use."""


@contextmanager
def mapped_errors() -> Iterator[None]:
    """The one place where the driver's errors become ours. Integrity errors and bugs stay what they
    are."""
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
        # The base class itself is what SQLite says of a file that is damaged or of another kind.
        if exc.connection_invalidated or type(exc) is SqlDatabaseError:
            raise DatabaseUnavailable(str(exc.orig)) from exc
        raise
    except SQLAlchemyError as exc:
        if type(exc).__name__ == "TimeoutError":
            raise DatabaseUnavailable("no connection became free in time") from exc
        raise
