"""Find runs: by id, and page by page with filters. Each page walks an index only as far as it
needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    ARRAY,
    Column,
    ColumnElement,
    Connection,
    Dialect,
    Double,
    Float,
    Select,
    String,
    Text,
    and_,
    bindparam,
    case,
    cast,
    exists,
    func,
    literal,
    null,
    or_,
    select,
    tuple_,
    union_all,
)

from everstep.wire import RunStatus
from service.db.tables import run_tags, runs
from service.model.run_rows import RunHead, RunRow

Columns = Select[*tuple[Any, ...]]
"""What to select of each run: a query of ``runs`` without conditions."""
Place = tuple[float, str]
"""(created_at, id) of a run: the sort key of lists, newest first."""

_BY_ID: Final = RunRow.select(runs).where(runs.c.id == bindparam("run_id"))
_ORDER: Final = (runs.c.created_at.desc(), runs.c.id.desc())
_RUN_TEXTS: Final = (runs.c.id, runs.c.name)
_TAG_TEXTS: Final = (run_tags.c.key, run_tags.c.value)


@dataclass(frozen=True)
class RunFilter:
    """Which runs to list; None or empty does not filter."""

    project: str | None = None
    statuses: tuple[RunStatus, ...] = ()
    name: str | None = None
    search: str | None = None
    """Text in the id, the name, or a tag's key or value, case-insensitive."""
    tags: tuple[tuple[str, str | None], ...] = ()
    """(key, value): a run must have every tag; value None matches any."""


EVERY_RUN: Final = RunFilter()


def find_run(connection: Connection, run_id: str) -> RunRow | None:
    """Return a run's row; None if it does not exist."""
    row = connection.execute(_BY_ID, {"run_id": run_id}).one_or_none()
    return RunRow.read(row) if row is not None else None


def page_query(columns: Columns, where: RunFilter, limit: int, before: Place | None) -> Columns:
    """Return the query for the first ``limit`` runs after ``before``, newest first."""
    statuses = tuple(dict.fromkeys(where.statuses))
    if len(where.tags) == 1 and where == RunFilter(tags=where.tags) and where.tags[0][1]:
        # The tag's index is sorted by run id, and so by creation time.
        query = columns.join(run_tags, run_tags.c.run_id == runs.c.id)
        query = query.where(_is_tag(*where.tags[0])).order_by(run_tags.c.run_id.desc())
        return (query if before is None else query.where(run_tags.c.run_id < before[1])).limit(
            limit
        )
    if len(statuses) < 2:
        return matching(_behind(columns, before), where).order_by(*_ORDER).limit(limit)
    # The index is sorted within each status: the page is among the first rows of each.
    heads = _behind(select(runs.c.created_at, runs.c.id), before)
    firsts = [
        matching(heads, replace(where, statuses=(status,)))
        .order_by(*_ORDER)
        .limit(limit)
        .subquery()
        for status in statuses
    ]
    found = union_all(*(select(first.c.created_at, first.c.id) for first in firsts)).subquery()
    ids = select(found.c.id).order_by(found.c.created_at.desc(), found.c.id.desc()).limit(limit)
    return columns.where(runs.c.id.in_(ids)).order_by(*_ORDER)


def _behind(columns: Columns, before: Place | None) -> Columns:
    if before is None:
        return columns
    # With a row comparison the index seeks to the place; "older, or equal with a smaller id" would
    # scan from the newest.
    place = tuple_(literal(before[0], Float), literal(before[1], String))
    return columns.where(tuple_(runs.c.created_at, runs.c.id) < place)


def matching(query: Columns, where: RunFilter) -> Columns:
    """Return the query for the runs that match a filter."""
    if where.project is not None:
        query = query.where(runs.c.project == where.project)
    if len(where.statuses) == 1:
        query = query.where(runs.c.status == where.statuses[0].value)
    elif where.statuses:
        query = query.where(runs.c.status.in_([status.value for status in where.statuses]))
    if where.name is not None:
        query = query.where(runs.c.name == where.name)
    if where.search:
        query = query.where(_holds(where.search))
    for key, value in where.tags:
        query = query.where(runs.c.id.in_(select(run_tags.c.run_id).where(_is_tag(key, value))))
    return query


def _is_tag(key: str, value: str | None) -> ColumnElement[bool]:
    is_key = run_tags.c.key == key
    return is_key if value is None else and_(is_key, run_tags.c.value == value)


def _holds(text: str) -> Any:
    held = or_(*(column.icontains(text, autoescape=True) for column in _TAG_TEXTS))
    tagged = exists().where(and_(run_tags.c.run_id == runs.c.id, held)).correlate(runs)
    return or_(*(column.icontains(text, autoescape=True) for column in _RUN_TEXTS), tagged)


# ---------------------------------------------------------------- run order

# Lists of runs in another order than by age: by a column, a metric, or a field of the spec.
#
# A value is a number, a text or absent. Numbers come first, then texts, then runs without a value,
# whichever the direction; among equal ones the newest run. A page continues behind the last run's
# value, so runs that come, go or change in between neither skip nor repeat others.

_TEXT_CHARS: Final = 100
"""Texts are compared by their beginning: a cursor contains it."""
_NUMBER_CHARS: Final = 300
_TEXTS: Final = ("name", "project", "status", "owner", "id")
_NUMBERS: Final = (
    "created_at",
    "started_at",
    "finished_at",
    "priority",
    "epoch",
    "step",
    "world_size",
    "attempt",
    "restarts",
    "steps_lost",
)
HEADS: Final = select(*(runs.c[name] for name in RunHead._fields))
_IN_JSON: Final = re.compile(r"(metrics|spec)\.(.{1,300})", re.DOTALL)
_PATH_PART: Final = re.compile(r'[^\x00-\x1f"\\\ud800-\udfff]{1,128}')
KEYS: Final = (*_NUMBERS, *_TEXTS, "best", "duration", "goodput", "metrics.NAME", "spec.FIELD")
"""What runs can be sorted by."""


class OrderPlace(NamedTuple):
    """A run's place in an order."""

    now: float
    """When the first page was read (unix seconds): durations of live runs are as of then."""
    kind: int
    """0 for a number, 1 for a text, 2 for neither."""
    number: float | None
    text: str | None
    created_at: float
    id: str


@dataclass(frozen=True)
class RunOrder:
    """By what runs are sorted, and whether the largest is first."""

    key: str
    descending: bool

    @classmethod
    def parse(cls, text: str) -> RunOrder:
        """Parse ``KEY`` or ``-KEY``. Raises ValueError for what is not in KEYS."""
        order = cls(text.removeprefix("-"), text.startswith("-"))
        order.path()
        return order

    def __str__(self) -> str:
        return f"-{self.key}" if self.descending else self.key

    def path(self) -> tuple[str, ...]:
        """Return the column, and the path in its JSON. Raises ValueError."""
        if self.key in (*_NUMBERS, *_TEXTS, "best", "duration", "goodput"):
            return (self.key,)
        found = _IN_JSON.fullmatch(self.key)
        if found is None:
            raise ValueError(f"{self.key[:60]!r} is not one of {', '.join(KEYS)}")
        column, rest = found.groups()
        parts = (rest,) if column == "metrics" else tuple(rest.split("."))
        if not all(map(_PATH_PART.fullmatch, parts)):
            raise ValueError(f"{self.key[:60]!r} has characters that cannot be sorted by")
        return (column, *parts)


def ordered_page(
    connection: Connection,
    where: RunFilter,
    order: RunOrder,
    limit: int,
    after: OrderPlace | None,
    now: float,
) -> tuple[list[RunHead], OrderPlace | None]:
    """Return the heads of a page, and the place of its last run if more follow.

    Args:
        connection: to the database.
        where: which runs.
        order: how they are sorted.
        limit: maximum number of runs.
        after: place of the last run of the previous page.
        now: unix seconds, for a first page.
    """
    now = now if after is None else after.now
    number, text = _order_value(connection.dialect, order, now)
    text = func.lower(func.substr(text, 1, _TEXT_CHARS))
    kind = case((number.is_not(None), 0), (text.is_not(None), 1), else_=2)
    heads = matching(
        HEADS.add_columns(kind, number, text).order_by(
            kind,
            *(each.desc() if order.descending else each.asc() for each in (number, text)),
            runs.c.created_at.desc(),
            runs.c.id.desc(),
        ),
        where,
    )
    if after is not None:
        heads = heads.where(_behind_in_order(order, after, kind, number, text))
    rows = connection.execute(heads.limit(limit + 1)).all()
    found = [RunHead._make(row[:3]) for row in rows[:limit]]
    if len(rows) <= limit:
        return found, None
    last = rows[limit - 1]
    return found, OrderPlace(now, last[3], last[4], last[5], last.created_at, last.id)


def _behind_in_order(
    order: RunOrder,
    after: OrderPlace,
    kind: ColumnElement[int],
    number: ColumnElement[float],
    text: ColumnElement[str],
) -> ColumnElement[bool]:
    """Return the condition for runs behind a place."""
    same: ColumnElement[bool] = tuple_(runs.c.created_at, runs.c.id) < tuple_(
        literal(after.created_at, Double), literal(after.id, String)
    )
    if after.kind < 2:
        value: ColumnElement[Any] = number if after.kind == 0 else text
        last = literal(after.number, Double) if after.kind == 0 else literal(after.text, Text)
        beyond = value < last if order.descending else value > last
        same = or_(beyond, and_(value == last, same))
    return or_(kind > after.kind, and_(kind == after.kind, same))


def _order_value(
    dialect: Dialect, order: RunOrder, now: float
) -> tuple[ColumnElement[Any], ColumnElement[Any]]:
    """Return a run's value as a number and as a text, at most one of which is not null."""
    name, *path = order.path()
    in_json = _sqlite_json if dialect.name == "sqlite" else _postgresql_json
    if path:
        return in_json(runs.c[name], tuple(path))
    if name in _TEXTS:
        return cast(null(), Double), runs.c[name]
    if name == "best":
        number, _ = in_json(runs.c.best, ("value",))
    elif name == "duration":
        number = func.coalesce(runs.c.finished_at, literal(now, Double)) - runs.c.created_at
    elif name == "goodput":
        number = _goodput(in_json, now)
    else:
        number = cast(runs.c[name], Double)
    return number, cast(null(), Text)


Json = Callable[[Column[Any], tuple[str, ...]], tuple[ColumnElement[Any], ColumnElement[Any]]]


def _goodput(in_json: Json, now: float) -> ColumnElement[Any]:
    """Return ``TimeLedger.share``; null before the first step."""
    ledger = runs.c.time_ledger
    spent, booked, created = (
        in_json(ledger, path)[0]
        for path in (("spent_us", "productive"), ("at_us",), ("created_us",))
    )
    end = func.coalesce(runs.c.finished_at, literal(now, Double)) * 1e6
    end = case((end > booked, end), else_=booked)
    running = case((in_json(ledger, ("bucket",))[1] == "productive", end - booked), else_=0.0)
    share = (func.coalesce(spent, 0.0) + running) / func.nullif(end - created, 0.0)
    return case((in_json(ledger, ("trained",))[1] == "true", share))


def _sqlite_json(
    column: Column[Any], path: tuple[str, ...]
) -> tuple[ColumnElement[Any], ColumnElement[Any]]:
    place = literal("$" + "".join(f'."{part}"' for part in path), Text)
    kind, value = func.json_type(column, place), func.json_extract(column, place)
    number = case((kind.in_(("integer", "real")), cast(value, Double)))
    text = case((kind.in_(("text", "array", "object")), value), (kind.in_(("true", "false")), kind))
    return number, cast(text, Text)


def _postgresql_json(
    column: Column[Any], path: tuple[str, ...]
) -> tuple[ColumnElement[Any], ColumnElement[Any]]:
    place = literal(list(path), ARRAY(Text))
    kind = func.json_typeof(func.json_extract_path(column, *path))
    value = column.op("#>>", return_type=Text())(place)
    # a longer integer may be beyond a double
    is_number = and_(kind == "number", func.length(value) <= _NUMBER_CHARS)
    number = case((is_number, cast(value, Double)))
    return number, case((kind.in_(("string", "boolean", "array", "object")), value))
