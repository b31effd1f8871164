"""Marks of nodes: cordoned, draining, or open again. Every method is one transaction."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, delete, func, select, text, update

from everstep.wire import Failure
from everstep.wire.events import EventKind
from service.db.audit import note_target
from service.db.engine import Database, insert_missing, replace_row
from service.db.planner_hints import IS_LIVE
from service.db.tables import events, node_marks, runs, storage_identity
from service.model.rows import MarkState, NodeFailure, NodeMarkRow
from storage.cluster import NodeMark, Owner

GONE_KEPT_S: Final = 24 * 3600.0
"""How long to keep the mark of a node that has left the cluster: a head that lost sight of it may
find it again."""
_FAILURES: Final = text("events.kind = 'failure'")
"""Literal SQL: with a bound value SQLite would not use the index of failures."""


class NodeMarkStore:
    """The last mark of each node. ``clock`` returns unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def all(self) -> dict[str, NodeMarkRow]:
        """Return every mark by node id."""
        with self._database.read() as connection:
            rows = map(NodeMarkRow.of, connection.execute(select(node_marks)).mappings())
            return {row.node_id: row for row in rows}

    def mark(
        self,
        node_id: str,
        state: MarkState,
        by: str,
        *,
        reason: str | None = None,
        deadline_s: float | None = None,
    ) -> NodeMarkRow:
        """Set the mark of a node; it replaces an earlier one.

        Args:
            node_id: the node, whether or not it is in the cluster.
            state: the new mark.
            by: who sets it.
            reason: free text.
            deadline_s: seconds from now at which the node will be removed; None if unknown.
        """
        now = self._clock()
        deadline = None if deadline_s is None else now + deadline_s
        row = NodeMarkRow(node_id, state, reason, by, now, deadline, None)
        with self._database.write() as connection:
            replace_row(connection, node_marks, row.columns())
        return row

    def keep(self, marks: Iterable[NodeMark]) -> None:
        """Add marks that another database has set, of nodes that have none here."""
        with self._database.write() as connection:
            for mark in marks:
                row = NodeMarkRow(
                    mark.node_id, mark.state, mark.reason, mark.by, mark.at, mark.deadline, None
                )
                insert_missing(connection, node_marks, row.columns())

    def cordon_if_unchanged(
        self, node_id: str, known_at: float | None, by: str, reason: str
    ) -> bool:
        """Cordon a node, unless its mark has changed since ``known_at``, the time of the last known
        mark (None: no mark)."""
        row = NodeMarkRow(node_id, "cordoned", reason, by, self._clock(), None, None)
        with self._database.write() as connection:
            if known_at is None:
                return insert_missing(connection, node_marks, row.columns())
            known = (node_marks.c.node_id == node_id, node_marks.c.at == known_at)
            changed = connection.execute(update(node_marks).where(*known).values(row.columns()))
            return changed.rowcount > 0

    def note_living(self, living: Collection[str], pardon_s: float) -> tuple[str, ...]:
        """Record which nodes the cluster has, and delete obsolete marks.

        Obsolete are marks of nodes that have been gone for a day, and of nodes that were opened
        again longer than ``pardon_s`` ago.

        Returns:
            Ids of nodes whose marks were deleted because they are gone.
        """
        now = self._clock()
        gone = []
        with self._database.write() as connection:
            for row in [
                NodeMarkRow.of(found) for found in connection.execute(select(node_marks)).mappings()
            ]:
                here = node_marks.c.node_id == row.node_id
                if row.node_id in living:
                    if row.gone_since is not None:
                        connection.execute(update(node_marks).where(here).values(gone_since=None))
                elif row.gone_since is None:
                    connection.execute(update(node_marks).where(here).values(gone_since=now))
                elif now - row.gone_since >= GONE_KEPT_S:
                    connection.execute(delete(node_marks).where(here))
                    gone.append(row.node_id)
                if row.state == "open" and now - row.at > pardon_s:
                    connection.execute(delete(node_marks).where(here))
        return tuple(gone)

    def failures_since(self, since: float) -> list[NodeFailure]:
        """Return failures of all runs with a known first failing rank and node; oldest first. Those
        that a drill caused are left out."""
        drill = events.alias("drill")
        ordered = (
            select(drill.c.seq)
            .where(
                drill.c.run_id == events.c.run_id,
                drill.c.kind == EventKind.DRILL_STARTED.value,
                drill.c.submission == events.c.submission,
                drill.c.attempt == events.c.attempt,
                drill.c.seq < events.c.seq,
            )
            .exists()
        )
        query = (
            select(
                events.c.run_id,
                events.c.at,
                events.c.attempt,
                events.c.submission,
                events.c.data,
                runs.c.owner,
                runs.c.spec["code", "archive"].as_string().label("archive"),
            )
            .join(runs, runs.c.id == events.c.run_id)
            .where(_FAILURES, events.c.at >= since, ~ordered)
            .order_by(events.c.at)
        )
        with self._database.read() as connection:
            found = connection.execute(query).all()
        return [
            NodeFailure(
                row.run_id,
                one.node_id,
                row.at,
                one.verdict,
                one.exception or "",
                one.kind,
                row.owner,
                row.archive,
            )
            for row, one in ((row, Failure.of(row)) for row in found)
            if one.node_id and one.first_rank is not None
        ]


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
            now = self._clock()
            row = {
                "name": _NAME,
                "storage_id": storage_id,
                "recorded_at": now,
                "seen_at": now,
                "database_id": owner.database_id,
                "generation": owner.generation,
            }
            replace_row(connection, storage_identity, row)
        return owner

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
    if row is None:
        return None
    owner = Owner(row.database_id, row.generation) if row.database_id else None
    return KnownStorage(row.storage_id, row.seen_at is not None, owner)
