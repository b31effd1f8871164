"""Finding runs: by id, and pages by filters, which walk an index from their first run to their last
whatever there is beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Float,
    FromClause,
    Integer,
    Select,
    String,
    and_,
    bindparam,
    exists,
    false,
    func,
    or_,
    select,
    tuple_,
    union_all,
)

from everstep.wire import RunStatus
from service.db.tables import run_tags, runs
from service.model.run_rows import RunRow

Columns = Select[*tuple[Any, ...]]
"""What is wanted of each run: a query of ``runs`` without conditions."""
Asked = tuple[Columns, dict[str, Any]]
"""A query, and what its parameters stand for."""
Place = tuple[float, str]
"""(created_at, id) of a run: newest first, a list goes by this."""

_BY_ID: Final = RunRow.select(runs).where(runs.c.id == bindparam("run_id"))
_ORDER: Final = (runs.c.created_at.desc(), runs.c.id.desc())
_RUN_TEXTS: Final = (runs.c.id, runs.c.name)
_TAG_TEXTS: Final = (run_tags.c.key, run_tags.c.value)
_MANY_TAGGED: Final = 500
_TAGGED: Final = select(run_tags.c.run_id).where(
    run_tags.c.key == bindparam("key"), run_tags.c.value == bindparam("value")
)
_LIMIT: Final = bindparam("limit", type_=Integer)
_BEFORE_AT: Final = bindparam("before_at", type_=Float)
_BEFORE_ID: Final = bindparam("before_id", type_=String)
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
    return RunRow.read(row) if row is not None else None


def page_query(
    connection: Connection, columns: Columns, where: RunFilter, limit: int, before: Place | None
) -> Asked:
    """The first ``limit`` of the runs behind ``before``, newest first."""
    where = replace(where, statuses=tuple(dict.fromkeys(where.statuses)))
    tag = next((number for number, (_, value) in enumerate(where.tags) if value is not None), None)
    if tag is not None and (
        where.project is not None or where.name is not None or len(where.statuses) == 1
    ):
        # Of a tag that many runs have, most are of other projects and statuses: the index of those
        # has fewer to pass over.
        key, value = where.tags[tag]
        if (
            connection.execute(_NUM_TAGGED, {"key": key, "value": value}).scalar_one()
            >= _MANY_TAGGED
        ):
            tag = None
    values = _values(where) | {"limit": limit}
    if before is not None:
        values |= {"before_at": before[0], "before_id": before[1]}
    make = _page if where.search is None else _page.__wrapped__
    return make(columns, _Shape.of(where), before is not None, tag), values


def counted(columns: Columns, where: RunFilter) -> Asked:
    """The runs that the filter takes, in no order."""
    return _matching(
        columns, _Shape.of(where), range(len(where.statuses)), in_order=False
    ), _values(where)


@dataclass(frozen=True)
class _Shape:
    """What a filter asks for, without the values: one query serves all filters of a shape."""

    by_project: bool
    num_statuses: int
    by_name: bool
    search: str | None
    tags: tuple[bool, ...]
    """Of each whether its value is asked for, too."""

    @classmethod
    def of(cls, where: RunFilter) -> _Shape:
        tags = tuple(value is not None for _, value in where.tags)
        return cls(
            where.project is not None,
            len(where.statuses),
            where.name is not None,
            where.search or None,
            tags,
        )


def _values(where: RunFilter) -> dict[str, Any]:
    """What the parameters of a query of this filter's shape stand for; a query takes those that it
    has."""
    values: dict[str, Any] = {"project": where.project, "name": where.name}
    values |= {
        f"wanted_status_{number}": status.value for number, status in enumerate(where.statuses)
    }
    for number, (key, value) in enumerate(where.tags):
        values |= {f"tag_key_{number}": key, f"tag_value_{number}": value}
    return values


@lru_cache(maxsize=512)
def _page(columns: Columns, shape: _Shape, is_behind: bool, tag: int | None) -> Columns:
    """A page's query; by the index of the tag of this number, where one is given. To build it takes
    longer than to ask it."""
    if tag is not None:
        return _tagged_page(columns, shape, is_behind, tag)
    if shape.num_statuses < 2:
        return (
            _matching(_behind(columns, is_behind), shape, range(shape.num_statuses))
            .order_by(*_ORDER)
            .limit(_LIMIT)
        )
    # Each status has its part of an index, in order: the page is among the first of each.
    heads = _behind(select(runs.c.created_at, runs.c.id), is_behind)
    firsts = [
        _matching(heads, shape, (number,)).order_by(*_ORDER).limit(_LIMIT).subquery()
        for number in range(shape.num_statuses)
    ]
    found = union_all(*(select(first.c.created_at, first.c.id) for first in firsts)).subquery()
    ids = select(found.c.id).order_by(found.c.created_at.desc(), found.c.id.desc()).limit(_LIMIT)
    return columns.where(runs.c.id.in_(ids)).order_by(*_ORDER)


def _tagged_page(columns: Columns, shape: _Shape, is_behind: bool, tag: int) -> Columns:
    """By the tag's index, in which runs lie by id: ids sort by the time of their making."""
    query = columns.join(run_tags, run_tags.c.run_id == runs.c.id).where(
        _is_tag(run_tags, tag, has_value=True)
    )
    if is_behind:
        query = query.where(run_tags.c.run_id < _BEFORE_ID)
    matching = _matching(query, shape, range(shape.num_statuses), beside=tag)
    return matching.order_by(run_tags.c.run_id.desc()).limit(_LIMIT)


def _behind(columns: Columns, is_behind: bool) -> Columns:
    if not is_behind:
        return columns
    # As one comparison of rows an index finds its place; "older, or as old with a lesser id" is
    # read from the newest on.
    return columns.where(tuple_(runs.c.created_at, runs.c.id) < tuple_(_BEFORE_AT, _BEFORE_ID))


def _matching(
    query: Columns,
    shape: _Shape,
    statuses: Sequence[int],
    *,
    beside: int | None = None,
    in_order: bool = True,
) -> Columns:
    """With the shape's conditions, of its statuses those of these numbers, without the tag of
    number ``beside``.

    ``in_order`` says that it walks an index and stops at the page's end.
    """
    wanted = [bindparam(f"wanted_status_{number}", type_=String) for number in statuses]
    if shape.by_project:
        query = query.where(runs.c.project == bindparam("project", type_=String))
    if len(wanted) == 1:
        query = query.where(runs.c.status == wanted[0])
    elif wanted:
        query = query.where(runs.c.status.in_(wanted))
    if shape.by_name:
        query = query.where(runs.c.name == bindparam("name", type_=String))
    if shape.search is not None:
        query = query.where(_holds(shape.search))
    for number, has_value in enumerate(shape.tags):
        if number == beside:
            continue
        other = run_tags.alias()
        if has_value and in_order:
            # A run's own value, asked for run by run: "exists" is a join to PostgreSQL, which it
            # begins at the wrong end once it plans for any value.
            value = (
                select(other.c.value)
                .where(other.c.run_id == runs.c.id, other.c.key == _key(number))
                .correlate(runs)
            )
            # To PostgreSQL an equality with anything is so rare that it would find all runs of the
            # project and sort them; of a condition that it knows nothing about it expects every
            # other run to meet it, and walks its index to the page's end.
            query = query.where(func.coalesce(value.scalar_subquery() == _value(number), false()))
        else:
            query = query.where(
                exists().where(
                    other.c.run_id == runs.c.id, _is_tag(other, number, has_value=has_value)
                )
            )
    return query


def _is_tag(tags: FromClause, number: int, *, has_value: bool) -> ColumnElement[bool]:
    is_key = tags.c.key == _key(number)
    return and_(is_key, tags.c.value == _value(number)) if has_value else is_key


def _key(number: int) -> BindParameter[str]:
    return bindparam(f"tag_key_{number}", type_=String)


def _value(number: int) -> BindParameter[str]:
    return bindparam(f"tag_value_{number}", type_=String)


def _holds(text: str) -> Any:
    held = or_(*(column.icontains(text, autoescape=True) for column in _TAG_TEXTS))
    tagged = exists().where(and_(run_tags.c.run_id == runs.c.id, held)).correlate(runs)
    return or_(*(column.icontains(text, autoescape=True) for column in _RUN_TEXTS), tagged)
