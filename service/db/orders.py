"""Requests to the ranks of a run (drills, profiles, stacks): events of its history, without a table
of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, select

from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from service.db.engine import Database
from service.db.tables import events
from service.db.writer import RunWriter
from service.model.rows import EventRow
from service.model.run_rows import RunRow
from service.model.states import TransitionConflict

TAKE_UP_S: Final = 15.0
"""How long a request blocks another of its kind. A driver takes it up within about a second."""


@dataclass(frozen=True)
class Order:
    """A kind of request: its name, the event that records it, and the events that show that it was
    taken up."""

    name: str
    requested: EventKind
    taken_up: tuple[EventKind, ...]


DRILL: Final = Order(
    "drill", EventKind.DRILL_REQUESTED, (EventKind.DRILL_STARTED, EventKind.DRILL_FAILED)
)
PROFILE: Final = Order(
    "profile",
    EventKind.PROFILE_REQUESTED,
    (
        EventKind.PROFILE_ORDERED,
        EventKind.PROFILE_STARTED,
        EventKind.PROFILE_DONE,
        EventKind.PROFILE_FAILED,
    ),
)

STACKS: Final = Order(
    "look at the stacks",
    EventKind.STACKS_REQUESTED,
    (EventKind.STACKS_ORDERED, EventKind.STACKS),
)


def record(
    database: Database, run: RunRow, order: Order, data: dict[str, Any], now: float
) -> EventRow:
    """Record a request to the ranks of ``run``, before it is sent.

    Args:
        database: the database.
        run: the run as the caller saw it.
        order: kind of request.
        data: data of the event; its ``id`` names the request.
        now: unix seconds.

    Raises:
        TransitionConflict: the run is not training, its ranks have changed, or its driver has not
            yet taken up another request of the kind.
    """
    with database.write() as connection:
        writer = RunWriter.lock(connection, run.id, now)
        found = writer.run
        if found.status != RunStatus.RUNNING or found.world_size is None:
            raise not_training(found, order)
        if (found.submission, found.attempt) != (run.submission, run.attempt):
            raise TransitionConflict(run.id, found.status, "its ranks have just changed; try again")
        waiting = _waiting(connection, run.id, order, since=now - TAKE_UP_S)
        if waiting is not None:
            raise TransitionConflict(
                run.id,
                found.status,
                f"{order.name} {waiting} has not been taken up yet; wait for it",
            )
        event = writer.append(order.requested, now, data, attempt=found.attempt)
        writer.save()
    return event


def not_training(run: RunRow, order: Order) -> TransitionConflict:
    """Return the error for a run that has no ranks."""
    return TransitionConflict(run.id, run.status, f"a {order.name} needs a run that is RUNNING")


def _waiting(connection: Connection, run_id: str, order: Order, since: float) -> str | None:
    """Return the id of the last request, if it was made after ``since`` and not taken up yet."""
    kinds = (order.requested, *order.taken_up)
    query = select(events.c.kind, events.c.at, events.c.data).where(
        events.c.run_id == run_id, events.c.kind.in_(kinds)
    )
    newest: tuple[str, float] | None = None
    for kind, at, data in connection.execute(query.order_by(events.c.seq)):
        if kind == order.requested:
            newest = data["id"], at
        elif newest is not None and data["id"] == newest[0]:
            newest = None
    return newest[0] if newest is not None and newest[1] > since else None
