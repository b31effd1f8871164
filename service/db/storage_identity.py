"""Which storage the database belongs to, and which runs have data there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, select, update

from service.db.audit import note_target
from service.db.conflicts import insert_missing, replace_row
from service.db.engine import Database
from service.db.planner_hints import IS_LIVE
from service.db.tables import runs, storage_identity

_NAME: Final = "runs"
_SELECT: Final = select(storage_identity.c.storage_id, storage_identity.c.seen_at).where(
    storage_identity.c.name == _NAME
)


@dataclass(frozen=True)
class KnownStorage:
    """The storage that the database belongs to."""

    storage_id: str
    was_seen: bool
    """Whether its identity file ever existed."""


class StorageRecords:
    """The row of the known storage. Every method is one transaction. ``clock`` returns unix
    seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def get(self) -> KnownStorage | None:
        """Return the known storage; None if there is none yet."""
        with self._database.read() as connection:
            return _known(connection)

    def claim(self, storage_id: str) -> KnownStorage:
        """Record an id if none is known. Return the known one: another replica may have been
        first."""
        with self._database.write() as connection:
            row = {"name": _NAME, "storage_id": storage_id, "recorded_at": self._clock()}
            insert_missing(connection, storage_identity, row)
            known = _known(connection)
        assert known is not None
        return known

    def seen(self, storage_id: str) -> None:
        """Record that the file with this id exists: from now on a storage without it is a different
        one."""
        row = storage_identity.c
        with self._database.write() as connection:
            which = (row.name == _NAME, row.storage_id == storage_id, row.seen_at.is_(None))
            connection.execute(update(storage_identity).where(*which).values(seen_at=self._clock()))

    def replace(self, storage_id: str) -> None:
        """Replace the known storage, at an operator's request."""
        note_target(storage_id)
        with self._database.write() as connection:
            now = self._clock()
            row = {"name": _NAME, "storage_id": storage_id, "recorded_at": now, "seen_at": now}
            replace_row(connection, storage_identity, row)

    def submitted_runs(self, limit: int) -> list[str]:
        """Return ids of runs that have a directory in the storage: live ones first, then the
        newest."""
        query = (
            select(runs.c.id)
            .where(runs.c.submission > 0)
            .order_by(IS_LIVE.desc(), runs.c.created_at.desc())
            .limit(limit)
        )
        with self._database.read() as connection:
            return list(connection.execute(query).scalars())

    def run_ids(self) -> set[str]:
        """Return the id of every run."""
        with self._database.read() as connection:
            return set(connection.execute(select(runs.c.id)).scalars())


def _known(connection: Connection) -> KnownStorage | None:
    row = connection.execute(_SELECT).one_or_none()
    return None if row is None else KnownStorage(row.storage_id, row.seen_at is not None)
