"""What was said of nodes: cordoned, draining, or open again. Every method is one transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

from sqlalchemy import delete, select, text, update

from everstep.wire import Failure
from service.db.conflicts import insert_missing, replace_row
from service.db.engine import Database
from service.db.tables import events, node_marks
from service.model.rows import MarkWord, NodeFailure, NodeMarkRow

GONE_KEPT_S: Final = 24 * 3600.0
"""A mark of a node that the cluster no longer has is kept for so long: a head that lost sight of it
may find it again."""
_FAILURES: Final = text("events.kind = 'failure'")
"""Written out, since a bound value would keep SQLite from the index of failures."""


class NodeMarkStore:
    """The last word about each node. ``clock`` gives unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def all(self) -> dict[str, NodeMarkRow]:
        """Every word by node id."""
        with self._database.read() as connection:
            rows = map(NodeMarkRow.of, connection.execute(select(node_marks)).mappings())
            return {row.node_id: row for row in rows}

    def say(
        self,
        node_id: str,
        state: MarkWord,
        by: str,
        *,
        reason: str | None = None,
        deadline_s: float | None = None,
    ) -> NodeMarkRow:
        """The last word counts: it replaces what was said of the node before.

        Args:
            node_id: The node, whether or not the cluster has it.
            state: What it is to be.
            by: Who says so.
            reason: Why, in words.
            deadline_s: Seconds from now at which the node is to be taken away; None where nobody
                said.
        """
        now = self._clock()
        deadline = None if deadline_s is None else now + deadline_s
        row = NodeMarkRow(node_id, state, reason, by, now, deadline, None)
        with self._database.write() as connection:
            replace_row(connection, node_marks, row.columns())
        return row

    def say_if_silent(self, node_id: str, known_at: float | None, by: str, reason: str) -> bool:
        """Cordon a node, unless somebody spoke of it since ``known_at``, when the last known word
        was said; None for none."""
        row = NodeMarkRow(node_id, "cordoned", reason, by, self._clock(), None, None)
        with self._database.write() as connection:
            if known_at is None:
                return insert_missing(connection, node_marks, row.columns())
            known = (node_marks.c.node_id == node_id, node_marks.c.at == known_at)
            changed = connection.execute(update(node_marks).where(*known).values(row.columns()))
            return changed.rowcount > 0

    def note_living(self, living: Collection[str], pardon_s: float) -> tuple[str, ...]:
        """Note which nodes the cluster has, and forget words that no longer matter.

        Those are words about nodes that have been gone for a day, and nodes that were opened again
        longer than ``pardon_s`` ago.

        Returns:
            Ids of nodes whose marks were forgotten because they are gone.
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
        """Failures of all runs whose first failing rank, and its node, are known; oldest first."""
        query = (
            select(
                events.c.run_id, events.c.at, events.c.attempt, events.c.submission, events.c.data
            )
            .where(_FAILURES, events.c.at >= since)
            .order_by(events.c.at)
        )
        with self._database.read() as connection:
            found = connection.execute(query).all()
        failures = [(row.run_id, row.at, Failure.of(row)) for row in found]
        return [
            NodeFailure(run_id, one.node_id, at, one.verdict, one.exception or "", one.kind)
            for run_id, at, one in failures
            if one.node_id and one.first_rank is not None
        ]
