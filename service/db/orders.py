"""Orders to the ranks of a run that trains (drills, profiles): entries of its history, for which no
table of its own is needed."""

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
"""A driver takes an order up within about a second; for so long no other one of its kind may take
its place."""


@dataclass(frozen=True)
class Order:
    """A kind of order: what it is called, the event that records it, and those that show that it
    was taken up."""

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


def record(
    database: Database, run: RunRow, order: Order, data: dict[str, Any], now: float
) -> EventRow:
    """Record an order for the ranks of ``run`` as the caller saw them, before anybody is told of
    it.

    Args:
        database: Where.
        run: As the caller saw it.
        order: Kind of order.
        data: Of the event; its ``id`` names the order.
        now: Unix seconds.

    Raises:
        TransitionConflict: The run does not train now, trains with other ranks than the caller saw,
            or has an order of the kind that its driver has not taken up yet.
    """
    with database.write() as connection:
        writer = RunWriter.lock(connection, run.id, now)
        found = writer.run
        if found.status != RunStatus.RUNNING or found.world_size is None:
            raise not_training(found, order)
        if (found.submission, found.attempt) != (run.submission, run.attempt):
            raise TransitionConflict(
                run.id, found.status, "its ranks have changed just now; ask again"
            )
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
    """What to raise for a run that has no ranks."""
    return TransitionConflict(
        run.id, run.status, f"a {order.name} needs a run that trains: one that is RUNNING"
    )


def _waiting(connection: Connection, run_id: str, order: Order, since: float) -> str | None:
    """Id of the order that was given last, where that was since then and nothing has come of it."""
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
