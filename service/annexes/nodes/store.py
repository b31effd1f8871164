"""Set and forget marks of nodes, and find the failures that began on them. Every method is one
transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

from sqlalchemy import delete, select, text, update

from everstep.wire import ErrorKind, Failure, Verdict
from everstep.wire.events import UNFIT, EventKind
from service.db.engine import insert_missing, replace_rows
from service.db.node_marks import NodeMarks
from service.db.tables import IS_UNENDED, events, node_marks, runs
from service.model.rows import MarkState, NodeFailure, NodeMarkRow, past
from storage.cluster import encode_marks, read_marks_file, write_marks_file
from storage.filesystem import Storage

GONE_KEPT_S: Final = 24 * 3600.0
"""How long to keep the mark of a node that has left the cluster: a head that lost sight of it may
find it again."""
_FAILURES: Final = text("events.kind = 'failure'")
"""Literal SQL: with a bound value SQLite would not use the index of failures."""


class NodeMarkStore(NodeMarks):
    """The last mark of each node."""

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
        now = self.clock()
        deadline = None if deadline_s is None else now + deadline_s
        row = NodeMarkRow(node_id, state, reason, by, now, deadline, None)
        with self._database.write() as connection:
            replace_rows(connection, node_marks, row.columns())
        return row

    def cordon_if_unchanged(
        self, node_id: str, known_at: float | None, by: str, reason: str
    ) -> bool:
        """Cordon a node, unless its mark has changed since ``known_at``, the time of the last known
        mark (None: no mark)."""
        row = NodeMarkRow(node_id, "cordoned", reason, by, self.clock(), None, None)
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
        now = self.clock()
        gone = []
        with self._database.write() as connection:
            found = connection.execute(NodeMarkRow.select(node_marks)).all()
            for row in [NodeMarkRow(*each) for each in found]:
                here = node_marks.c.node_id == row.node_id
                if row.node_id in living:
                    if row.gone_since is not None:
                        connection.execute(update(node_marks).where(here).values(gone_since=None))
                elif row.gone_since is None:
                    connection.execute(update(node_marks).where(here).values(gone_since=now))
                elif now - past(row.gone_since, now) >= GONE_KEPT_S:
                    connection.execute(delete(node_marks).where(here))
                    gone.append(row.node_id)
                if row.state == "open" and now - past(row.at, now) > pardon_s:
                    connection.execute(delete(node_marks).where(here))
        return tuple(gone)

    def failures_since(self, since: float) -> list[NodeFailure]:
        """Return failures of all runs with a known first failing rank and node, and nodes that live
        runs have left since a rank was slow there alone; oldest first. Those that a drill caused
        are left out."""
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
        names = ("run_id", "kind", "at", "attempt", "submission", "data")
        archive = runs.c.spec["code", "archive"].as_string().label("archive")
        query = (
            select(*(events.c[name] for name in names), runs.c.owner, archive)
            .join(runs, runs.c.id == events.c.run_id)
            .where(events.c.at >= since, ~ordered)
        )
        moves = (IS_UNENDED, events.c.kind == EventKind.STRAGGLER_MOVED.value)
        with self._database.read() as connection:
            found = [
                *connection.execute(query.where(_FAILURES)),
                *connection.execute(query.where(*moves)),
            ]
        found.sort(key=lambda row: float(row.at))
        return [each for row in found if (each := _node_failure(row)) is not None]


def _node_failure(row: Any) -> NodeFailure | None:
    """Return the failure of an event with its run's owner and archive; None without a node, and for
    data that does not fit: one run's code must not end the care for all nodes."""
    try:
        if row.kind == EventKind.STRAGGLER_MOVED:
            return _slow_node(row)
        one = Failure.of(row)
        if not one.node_id or one.first_rank is None:
            return None
        return NodeFailure(
            row.run_id,
            one.node_id,
            row.at,
            one.verdict,
            one.exception or "",
            one.kind,
            row.owner,
            row.archive,
        )
    except UNFIT:
        return None


def _slow_node(row: Any) -> NodeFailure | None:
    """Return what a run has found out about a node with a slow rank; None if the rank is as slow
    elsewhere, or nobody knows yet."""
    if row.data["stays"] is not True:
        return None
    words = (
        f"slow: rank {row.data['rank']} took {row.data['skew']:.1f} times as long as its peers "
        "here, and no rank does since they left"
    )
    verdict, kind = Verdict.NODE_LOST.value, ErrorKind.NODE
    node_id = str(row.data["node_id"])
    return NodeFailure(row.run_id, node_id, row.at, verdict, words, kind, row.owner, row.archive)


# ---------------------------------------------------------------- marks file

# The file that tells drivers which nodes are marked, kept equal to the database.


class MarksFile:
    """Writes the file from the database's rows. Synchronous: call it in a thread.

    ``require`` raises StorageMismatch unless the storage is the database's.
    """

    def __init__(self, storage: Storage, marks: NodeMarkStore, require: Callable[[], None]) -> None:
        self._require = require
        self._storage = storage
        self._marks = marks

    def publish(self) -> bool:
        """Make the file say what the database says; whether it had to be written.

        Whoever writes looks at the database once more afterwards. Two writers at a time, of one
        process or of two, therefore leave the newer words, whichever of them wrote last.

        Raises:
            StorageMismatch: The storage is not this database's; its marks stay as they are.
            StorageError: The file may be old; the next call heals it.
            DatabaseError: Nothing was written.
        """
        self._require()
        wanted = self._wanted()
        if read_marks_file(self._storage) == wanted:
            return False
        while True:
            write_marks_file(self._storage, wanted)
            now_wanted = self._wanted()
            if now_wanted == wanted:
                return True
            wanted = now_wanted

    def _wanted(self) -> bytes:
        return encode_marks(
            mark for row in self._marks.all().values() if (mark := row.mark) is not None
        )
