"""Drills in the database: entries of a run's history, which no table of their own is needed for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection, select

from everstep.drills import DrillRequest
from everstep.events import EventKind
from everstep.wire import RunStatus
from service.db.engine import Database
from service.db.ids import new_drill_id
from service.db.rows import EventRow, RunRow
from service.db.tables import events
from service.db.writer import RunWriter
from service.states import TransitionConflict

TAKE_UP_S: Final = 15.0
"""A driver takes a drill up within about a second; for so long no other drill may take its place."""

_KINDS: Final = (EventKind.DRILL_REQUESTED, EventKind.DRILL_STARTED, EventKind.DRILL_FAILED)


class DrillStore:
    """Drills that were asked for. ``clock`` gives unix seconds."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def request(self, run: RunRow, request: DrillRequest) -> EventRow:
        """Record a drill of ``run`` as the caller saw it, before anybody is told of it.

        Raises TransitionConflict where the run does not train now, trains with other ranks than the caller saw, or has a drill
        that its driver has not taken up yet.
        """
        now = self._clock()
        with self._database.write() as connection:
            writer = RunWriter.lock(connection, run.id, now)
            found = writer.run
            if found.status != RunStatus.RUNNING or found.world_size is None:
                raise TransitionConflict(run.id, found.status, "a drill needs a run that trains: one that is RUNNING")
            if (found.submission, found.attempt) != (run.submission, run.attempt):
                raise TransitionConflict(run.id, found.status, "its ranks have changed just now; ask again")
            waiting = _waiting(connection, run.id, since=now - TAKE_UP_S)
            if waiting is not None:
                raise TransitionConflict(run.id, found.status, f"drill {waiting} has not been taken up yet; wait for it")
            data = {"id": new_drill_id(now), "kind": request.kind.value, "rank": request.rank}
            event = writer.append(EventKind.DRILL_REQUESTED, now, data, attempt=found.attempt)
            writer.save()
        return event


def _waiting(connection: Connection, run_id: str, since: float) -> str | None:
    """Id of the drill that was asked for last, where that was since then and nothing has come of it."""
    query = select(events.c.kind, events.c.at, events.c.data).where(events.c.run_id == run_id, events.c.kind.in_(_KINDS))
    newest: tuple[str, float] | None = None
    for kind, at, data in connection.execute(query.order_by(events.c.seq)):
        if kind == EventKind.DRILL_REQUESTED:
            newest = data["id"], at
        elif newest is not None and data["id"] == newest[0]:
            newest = None
    return newest[0] if newest is not None and newest[1] > since else None
