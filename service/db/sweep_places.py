"""The place of a run in its sweep: taken in the transaction that records the run, so that no place
gets two."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, select, update

from everstep.wire.sweep import SweepStatus
from service.db.errors import DatabaseError
from service.db.sweep_tables import sweep_runs, sweeps


class PlaceTaken(DatabaseError):
    """The place has a run, or its sweep does not run any more: there is nothing to submit."""


class SweepPlace(NamedTuple):
    """A run's place: its sweep, and its number in it."""

    sweep_id: str
    number: int


def check_place(connection: Connection, place: SweepPlace) -> None:
    """Hold the sweep until the transaction ends. Raise PlaceTaken."""
    sweep = select(sweeps.c.status).where(sweeps.c.id == place.sweep_id).with_for_update()
    status = connection.execute(sweep).scalar_one_or_none()
    run_id = select(sweep_runs.c.run_id).where(_is(place))
    if status != SweepStatus.RUNNING or connection.execute(run_id).scalar_one() is not None:
        raise PlaceTaken(f"run {place.number} of sweep {place.sweep_id} is not to be submitted")


def fill_place(connection: Connection, place: SweepPlace, run_id: str) -> None:
    connection.execute(update(sweep_runs).where(_is(place)).values(run_id=run_id))


def _is(place: SweepPlace) -> ColumnElement[bool]:
    return and_(sweep_runs.c.sweep_id == place.sweep_id, sweep_runs.c.number == place.number)
