"""A database with the newest tables, without the cost of migrating it for each test."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from service.annex import Annex, hooks_of
from service.annexes.registry import ANNEXES
from service.db.engine import Database


def prepared_database(url: str, annexes: Sequence[Annex] = ANNEXES) -> Database:
    """Return a database with the newest tables, as a service with these annexes opens it.

    A SQLite file that is not there yet begins as a copy of one that was migrated once; PostgreSQL's
    tests have such a template of their own.
    """
    database = Database(url, hooks_of(annexes))
    path = Path(database.url.database or "")
    if not database.is_sqlite or path.exists():
        database.migrate()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_migrated())
    return database


@cache
def _migrated() -> bytes:
    """Return the content of a SQLite file with the newest tables."""
    with TemporaryDirectory() as directory:
        path = Path(directory, "everstep.db")
        database = Database(f"sqlite:///{path}")
        database.migrate()
        database.close()
        assert [each.name for each in Path(directory).iterdir()] == [path.name], "all is in it"
        return path.read_bytes()
