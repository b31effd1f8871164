"""Series that are thinned by the database, on SQLite and PostgreSQL."""

from __future__ import annotations

from sqlalchemy import insert

from everstep.spec.parsing import parse_spec
from service.db.engine import Database
from service.db.events import SeriesStore
from service.db.runs import RunStore
from service.db.tables import metrics
from tests.support.api_service import NOON, spec

pytest_plugins = ["tests.support.database_fixtures"]


def fill(database: Database, **series: dict[int, float | None]) -> str:
    """A run that reported these values by step; its id."""
    run, _ = RunStore(database).create(parse_spec(spec()), "tok_test")
    rows = [
        {"run_id": run.id, "name": name, "step": step, "at": NOON + step, "value": value}
        for name, values in series.items()
        for step, value in values.items()
    ]
    with database.write() as connection:
        connection.execute(insert(metrics), rows)
    return run.id


def test_thinning_keeps_ends_extremes_and_what_was_not_finite(database: Database) -> None:
    values: dict[int, float | None] = {step: float(step * 7919 % 101) for step in range(5, 3005)}
    values |= {1500: 1e9, 1501: -1e9, 2222: None}
    gappy = {step: float(step % 13) for step in [*range(1, 500), *range(90_000, 90_500)]}
    run_id = fill(
        database,
        loss=values,
        gappy=gappy,
        few={100: 1.0, 200: 2.0},
        lr=dict.fromkeys(range(3000), 0.1),
    )
    fill(database, loss=dict.fromkeys(range(4000), 1e12))
    series = SeriesStore(database)
    assert series.names(run_id) == ["few", "gappy", "loss", "lr"]
    for most in (6, 50, 700):
        thin = [
            (point.step, point.at, point.value) for point in series.points(run_id, "loss", most)
        ]
        assert len(thin) <= most and thin == sorted(set(thin))
        assert (thin[0][0], thin[-1][0]) == (5, 3004)
        assert {
            (1500, NOON + 1500, 1e9),
            (1501, NOON + 1501, -1e9),
            (2222, NOON + 2222, None),
        } <= set(thin), most
        assert all(values[step] == value for step, _, value in thin)
    assert len(series.points(run_id, "loss", 700)) > 300, "no more is left out than must be"
    assert {point.value for point in series.points(run_id, "gappy", 40)} >= {0.0, 12.0}
    assert len(series.points(run_id, "lr", 100)) <= 100
    assert [point.step for point in series.points(run_id, "few", 4)] == [100, 200]
    assert len(series.points(run_id, "loss")) == 3000
    assert series.points(run_id, "nothing", 10) == []


def test_a_part_with_a_gap_keeps_its_smallest_value_too(database: Database) -> None:
    values: dict[int, float | None] = {step: 1.0 for step in range(1000)}
    values |= {400: None, 405: -5.0, 410: 5.0}
    found = {
        point.step
        for point in SeriesStore(database).points(fill(database, loss=values), "loss", 20)
    }
    assert {400, 405, 410} <= found
