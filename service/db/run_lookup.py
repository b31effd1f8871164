"""Finding runs: by id, and pages by filters, which walk an index from their first run to their last whatever there is beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Select, and_, bindparam, exists, func, literal, or_, select, tuple_, union_all

from everstep.wire import RunStatus
from service.db.rows import RunRow
from service.db.tables import run_tags, runs

Columns = Select[*tuple[Any, ...]]
"""What is wanted of each run: a query of ``runs`` without conditions."""
Place = tuple[float, str]
"""(created_at, id) of a run: newest first, a list goes by this."""

_BY_ID: Final = RunRow.select(runs).where(runs.c.id == bindparam("run_id"))
_ORDER: Final = (runs.c.created_at.desc(), runs.c.id.desc())
_RUN_TEXTS: Final = (runs.c.id, runs.c.name)
_TAG_TEXTS: Final = (run_tags.c.key, run_tags.c.value)
_MANY_TAGGED: Final = 500
_TAGGED: Final = select(run_tags.c.run_id).where(run_tags.c.key == bindparam("key"), run_tags.c.value == bindparam("value"))
_NUM_TAGGED: Final = select(func.count()).select_from(_TAGGED.limit(_MANY_TAGGED).subquery())


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


def page_query(connection: Connection, columns: Columns, where: RunFilter, limit: int, before: Place | None) -> Columns:
    """The first ``limit`` of the runs behind ``before``, newest first."""
    statuses = tuple(dict.fromkeys(where.statuses))
    tag = next(((key, value) for key, value in where.tags if value is not None), None)
    if tag is not None:
        # Of a tag that many runs have, most are of other projects and statuses: the index of those has fewer to pass over.
        is_narrowed = where.project is not None or where.name is not None or len(statuses) == 1
        if not is_narrowed or connection.execute(_NUM_TAGGED, {"key": tag[0], "value": tag[1]}).scalar_one() < _MANY_TAGGED:
            return _tagged_page(columns, where, tag, limit, before)
    if len(statuses) < 2:
        return _matching(_behind(columns, before), where).order_by(*_ORDER).limit(limit)
    # Each status has its part of an index, in order: the page is among the first of each.
    heads = select(runs.c.created_at, runs.c.id)
    firsts = [
        _matching(_behind(heads, before), where, statuses=(status,)).order_by(*_ORDER).limit(limit).subquery()
        for status in statuses
    ]
    found = union_all(*(select(first.c.created_at, first.c.id) for first in firsts)).subquery()
    ids = select(found.c.id).order_by(found.c.created_at.desc(), found.c.id.desc()).limit(limit)
    return columns.where(runs.c.id.in_(ids)).order_by(*_ORDER)


def counted(columns: Columns, where: RunFilter) -> Columns:
    """The runs that the filter takes, in no order."""
    return _matching(columns, where)


def _tagged_page(columns: Columns, where: RunFilter, tag: tuple[str, str | None], limit: int, before: Place | None) -> Columns:
    """By the tag's index, in which runs lie by id: ids sort by the time of their making."""
    key, value = tag
    query = columns.join(run_tags, run_tags.c.run_id == runs.c.id).where(run_tags.c.key == key, run_tags.c.value == value)
    if before is not None:
        query = query.where(run_tags.c.run_id < before[1])
    return _matching(query, where, beside=tag).order_by(run_tags.c.run_id.desc()).limit(limit)


def _behind(columns: Columns, before: Place | None) -> Columns:
    if before is None:
        return columns
    # As one comparison of rows an index finds its place; "older, or as old with a lesser id" is read from the newest on.
    return columns.where(tuple_(runs.c.created_at, runs.c.id) < tuple_(literal(before[0]), literal(before[1])))


def _matching(
    query: Columns,
    where: RunFilter,
    *,
    statuses: tuple[RunStatus, ...] | None = None,
    beside: tuple[str, str | None] | None = None,
) -> Columns:
    """With the filter's conditions; of these ``statuses`` in place of its own, and without the tag ``beside``, where given."""
    statuses = where.statuses if statuses is None else statuses
    if where.project is not None:
        query = query.where(runs.c.project == where.project)
    if len(statuses) == 1:
        query = query.where(runs.c.status == statuses[0].value)
    elif statuses:
        query = query.where(runs.c.status.in_([status.value for status in statuses]))
    if where.name is not None:
        query = query.where(runs.c.name == where.name)
    if where.search:
        query = query.where(_holds(where.search))
    for key, value in where.tags:
        if (key, value) != beside:
            query = query.where(_has_tag(key, value))
    return query


def _holds(text: str) -> Any:
    held = or_(*(column.icontains(text, autoescape=True) for column in _TAG_TEXTS))
    tagged = exists().where(and_(run_tags.c.run_id == runs.c.id, held)).correlate(runs)
    return or_(*(column.icontains(text, autoescape=True) for column in _RUN_TEXTS), tagged)


def _has_tag(key: str, value: str | None) -> Any:
    other = run_tags.alias()
    tagged = and_(other.c.run_id == runs.c.id, other.c.key == key)
    return exists().where(tagged if value is None else and_(tagged, other.c.value == value))
