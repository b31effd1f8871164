"""Time series of metrics, down-sampled in the database: of a million points, only those that are
shown are read."""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy import (
    CTE,
    ColumnElement,
    Connection,
    ScalarSelect,
    Select,
    func,
    literal,
    select,
    union,
)

from service.db.engine import Database
from service.db.tables import metrics
from service.model.rows import MetricPoint
from service.projections.downsampling import Point, downsample


class SeriesStore:
    """Metrics of runs, by name and step."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def names(self, run_id: str) -> list[str]:
        """Return every metric that the run ever reported, in order. One index seek each, however
        many points there are."""
        mine = metrics.c.run_id == run_id
        first = (
            select(func.min(metrics.c.name).label("name")).where(mine).cte("known", recursive=True)
        )
        behind = (
            select(func.min(metrics.c.name))
            .where(mine, metrics.c.name > first.c.name)
            .scalar_subquery()
        )
        known = first.union_all(select(behind).where(first.c.name.is_not(None)))
        with self._database.read() as connection:
            return [
                name
                for name in connection.execute(select(known.c.name)).scalars()
                if name is not None
            ]

    def behind(self, run_id: str, name: str, step: int, most: int) -> list[MetricPoint]:
        """Return the first ``most`` points of a metric behind a step, none left out."""
        query = _series(run_id, name).where(metrics.c.step > step).order_by(metrics.c.step)
        with self._database.read() as connection:
            return [MetricPoint(name, *point) for point in _rows(connection, query.limit(most))]

    def points(self, run_id: str, name: str, most: int | None = None) -> list[MetricPoint]:
        """Return a metric by step. A series of more than ``most`` points is down-sampled; its ends,
        the extremes of each part, and values that were not finite are kept."""
        query = _series(run_id, name).order_by(metrics.c.step)
        with self._database.read() as connection:
            found = _rows(connection, query if most is None else query.limit(most + 1))
            if most is not None and len(found) > most:
                last = _rows(
                    connection, _series(run_id, name).order_by(metrics.c.step.desc()).limit(1)
                )[0]
                found = downsample(
                    _rows(
                        connection,
                        _outstanding(
                            self._database.is_sqlite, run_id, name, found[0][0], last[0], most
                        ),
                    ),
                    most,
                )
        return [MetricPoint(name, *point) for point in found]


def _series(run_id: str, name: str) -> Select[Any]:
    return select(metrics.c.step, metrics.c.at, metrics.c.value).where(
        metrics.c.run_id == run_id, metrics.c.name == name
    )


def _rows(connection: Connection, query: Select[Any]) -> list[Point]:
    return [(step, at, value) for step, at, value in connection.execute(query)]


def _outstanding(
    sqlite: bool, run_id: str, name: str, first: int, last: int, most: int
) -> Select[Any]:
    """Return the query for candidate points by step: both ends of the series, and of each part its
    largest value, its smallest, and one that is not finite."""
    width = -(-(last - first + 1) // max(1, (most - 2) // 2))
    parts = select(literal(first).label("low")).cte("parts", recursive=True)
    parts = parts.union_all(select(parts.c.low + width).where(parts.c.low + width <= last))
    inside = (
        (metrics.c.run_id == run_id)
        & (metrics.c.name == name)
        & (metrics.c.step >= parts.c.low)
        & (metrics.c.step < parts.c.low + width)
    )
    # One pass finds the smallest value, or one that was not finite, which sorts first. Only in that
    # case search again for the smallest.
    lowest = select(parts.c.low, _first_step(sqlite, parts, inside, least=True).label("step")).cte(
        "lowest"
    )
    gaps = (
        select(lowest.c.low)
        .join(
            metrics,
            (metrics.c.run_id == run_id)
            & (metrics.c.name == name)
            & (metrics.c.step == lowest.c.step),
        )
        .where(metrics.c.value.is_(None))
    )
    finite = inside & metrics.c.value.is_not(None)
    picked = union(
        select(literal(first).label("step")),
        select(literal(last)),
        select(lowest.c.step),
        select(_first_step(sqlite, parts, inside, least=False)).select_from(parts),
        select(_first_step(sqlite, parts, finite, least=True))
        .select_from(parts)
        .where(parts.c.low.in_(gaps)),
    ).subquery("picked")
    return (
        _series(run_id, name).join(picked, picked.c.step == metrics.c.step).order_by(metrics.c.step)
    )


def _first_step(
    sqlite: bool, parts: CTE, inside: ColumnElement[bool], *, least: bool
) -> ScalarSelect[Any]:
    """Return the step of a part's smallest value, where one that is not finite sorts first, or of
    its largest, where it sorts last."""
    if sqlite:
        # With min() and max() SQLite returns the other columns of the same row: twice as fast as a
        # sort.
        value = func.coalesce(metrics.c.value, literal(-math.inf))
        row = (
            select(metrics.c.step, (func.min(value) if least else func.max(value)).label("value"))
            .where(inside)
            .correlate(parts)
            .subquery()
        )
        return select(row.c.step).where(row.c.value.is_not(None)).scalar_subquery()
    order = metrics.c.value.asc().nulls_first() if least else metrics.c.value.desc().nulls_last()
    return (
        select(metrics.c.step)
        .where(inside)
        .order_by(order)
        .limit(1)
        .correlate(parts)
        .scalar_subquery()
    )
