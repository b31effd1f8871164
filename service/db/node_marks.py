"""What the database knows of nodes and of the storage. Every method is one transaction."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, func, select, update

from service.db.audit import note_target
from service.db.engine import Store, insert_missing, replace_rows
from service.db.tables import node_marks, runs, storage_identity
from service.model.rows import NodeMarkRow
from storage.cluster import MarkedNode, Owner


class NodeMarks(Store):
    """The last mark of each node: cordoned, draining, or open again."""

    def all(self) -> dict[str, NodeMarkRow]:
        """Return every mark by node id."""
        rows = self._rows(NodeMarkRow, NodeMarkRow.select(node_marks))
        return {row.node_id: row for row in rows}

    def keep(self, marks: Iterable[MarkedNode]) -> None:
        """Add marks that another database has set, of nodes that have none here."""
        with self._database.write() as connection:
            for mark in marks:
                row = NodeMarkRow(
                    mark.node_id, mark.state, mark.reason, mark.by, mark.at, mark.deadline, None
                )
                insert_missing(connection, node_marks, row.columns())


# ---------------------------------------------------------------- storage identity

# Which storage the database belongs to, and which runs have data there.

_NAME: Final = "runs"
_SELECT: Final = select(storage_identity).where(storage_identity.c.name == _NAME)


@dataclass(frozen=True)
class KnownStorage:
    """The storage that the database belongs to."""

    storage_id: str
    was_seen: bool
    """Whether its identity file ever existed."""
    owner: Owner | None
    """This database, as the storage is to name it; None before a service took the storage."""


class StorageRecords(Store):
    """The row of the known storage. Every method is one transaction."""

    def get(self) -> KnownStorage | None:
        """Return the known storage; None if there is none yet."""
        with self._database.read() as connection:
            return _known(connection)

    def claim(self, storage_id: str) -> KnownStorage:
        """Record an id if none is known. Return the known one: another replica may have been
        first."""
        with self._database.write() as connection:
            row = {"name": _NAME, "storage_id": storage_id, "recorded_at": self.clock()}
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
            connection.execute(update(storage_identity).where(*which).values(seen_at=self.clock()))

    def take(self) -> Owner:
        """Count a start of a service with this database, which then writes the result to the
        storage. A storage is known."""
        row = storage_identity.c
        with self._database.write() as connection:
            connection.execute(
                update(storage_identity)
                .where(row.name == _NAME)
                .values(
                    generation=row.generation + 1,
                    database_id=func.coalesce(row.database_id, str(uuid.uuid4())),
                )
            )
            known = _known(connection)
        assert known is not None and known.owner is not None
        return known.owner

    def replace(self, storage_id: str) -> Owner:
        """Replace the known storage, at an operator's request. Return this database under a new id,
        which copies of it do not have."""
        note_target(storage_id)
        owner = Owner(str(uuid.uuid4()), 1)
        with self._database.write() as connection:
            now = self.clock()
            row = {
                "name": _NAME,
                "storage_id": storage_id,
                "recorded_at": now,
                "seen_at": now,
                "database_id": owner.database_id,
                "generation": owner.generation,
            }
            replace_rows(connection, storage_identity, row)
        return owner

    def run_ids(self) -> set[str]:
        """Return the id of every run."""
        with self._database.read() as connection:
            return set(connection.execute(select(runs.c.id)).scalars())


def _known(connection: Connection) -> KnownStorage | None:
    row = connection.execute(_SELECT).one_or_none()
    if row is None:
        return None
    owner = Owner(row.database_id, row.generation) if row.database_id else None
    return KnownStorage(row.storage_id, row.seen_at is not None, owner)
