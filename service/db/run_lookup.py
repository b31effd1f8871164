"""Finding runs in the database: by id, and by filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Select, and_, bindparam, exists, or_

from everstep.wire import RunStatus
from service.db.rows import RunRow
from service.db.tables import run_tags, runs

_BY_ID: Final = RunRow.select(runs).where(runs.c.id == bindparam("run_id"))
_RUN_TEXTS: Final = (runs.c.id, runs.c.name)
_TAG_TEXTS: Final = (run_tags.c.key, run_tags.c.value)


@dataclass(frozen=True)
class RunFilter:
    """Which runs to list; None or empty does not filter."""

    project: str | None = None
    statuses: tuple[RunStatus, ...] = ()
    name: str | None = None
    search: str | None = None
    """Text that the id, the name, or a tag's key or value holds, in whatever case."""
    tags: tuple[tuple[str, str | None], ...] = ()
    """(key, value): every tag must be there; value None takes any."""


EVERY_RUN: Final = RunFilter()


def find_run(connection: Connection, run_id: str) -> RunRow | None:
    """A run's row; None where there is no such run."""
    row = connection.execute(_BY_ID, {"run_id": run_id}).one_or_none()
    return RunRow(*row) if row is not None else None


def filtered(where: RunFilter) -> Select[Any]:
    """A query for the rows of these runs."""
    query = RunRow.select(runs)
    if where.project is not None:
        query = query.where(runs.c.project == where.project)
    if where.statuses:
        query = query.where(runs.c.status.in_([status.value for status in where.statuses]))
    if where.name is not None:
        query = query.where(runs.c.name == where.name)
    if where.search:
        tagged = and_(
            run_tags.c.run_id == runs.c.id, or_(*(column.icontains(where.search, autoescape=True) for column in _TAG_TEXTS))
        )
        query = query.where(
            or_(*(column.icontains(where.search, autoescape=True) for column in _RUN_TEXTS), exists().where(tagged))
        )
    for key, value in where.tags:
        tagged = and_(run_tags.c.run_id == runs.c.id, run_tags.c.key == key)
        query = query.where(exists().where(tagged if value is None else and_(tagged, run_tags.c.value == value)))
    return query
