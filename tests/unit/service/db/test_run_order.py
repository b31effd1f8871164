"""Lists of runs in another order than by age, page by page, on SQLite and PostgreSQL."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from sqlalchemy import update

from everstep.spec.parsing import parse_spec
from service.db.engine import Database
from service.db.run_lookup import OrderPlace, RunFilter, RunOrder
from service.db.runs import RunStore
from service.db.tables import runs as table
from service.model.run_rows import RunRow
from service.projections.goodput import TimeLedger
from tests.support.api_service import NOON, ManualClock, spec

pytest_plugins = ["tests.support.database_fixtures"]

VALUES: list[Any] = [0.003, 1e-5, 0.5, None, "auto", True, [3, 1], 7, "Zebra", "apple", 0.5, 12]


def fill(database: Database, runs: RunStore, clock: ManualClock) -> list[RunRow]:
    """Twelve runs with values of every kind; some were created at the same moment."""
    made = []
    for number, value in enumerate(VALUES):
        clock.now = NOON + number // 3
        fields = spec(name=f"run {number % 5}", train={"seed": number})
        run, _ = runs.create(parse_spec(fields), "tok", owner=None if number == 4 else f"o{value}")
        changed = dict(run.spec) | {"args": {} if value is None else {"x": value}}
        metrics = {} if type(value) not in (int, float) else {"val.acc/top 1": float(value)}
        ledger = TimeLedger.begin(run.created_at)
        ledger.trained, ledger.bucket = number % 4 > 0, "productive" if number % 2 else "idle"
        ledger.spent_us, ledger.at_us = {"productive": number * 1000}, ledger.at_us + number * 1000
        with database.write() as connection:
            connection.execute(
                update(table)
                .where(table.c.id == run.id)
                .values(
                    spec=changed,
                    metrics=metrics,
                    step=number % 4,
                    time_ledger=ledger.dump(),
                    finished_at=clock.now + 50 - number if number % 3 == 0 else None,
                )
            )
        made.append(run)
    clock.now = NOON + 100
    found = runs.rows([run.id for run in made])
    return [found[run.id] for run in made]


def read(
    runs: RunStore, order: RunOrder, limit: int = 5, where: RunFilter | None = None
) -> list[str]:
    """The ids of all pages."""
    found: list[str] = []
    after: OrderPlace | None = None
    while True:
        heads, after = runs.ordered(where or RunFilter(), order, limit, after)
        found += [head.id for head in heads]
        if after is None:
            return found
        assert len(heads) == limit


def key_of(run: RunRow, name: str, now: float) -> Any:
    match name.split(".", 1):
        case ["spec", "args.x"]:
            return run.spec["args"].get("x")
        case ["metrics", metric]:
            return run.metrics.get(metric)
        case ["duration"]:
            return (run.finished_at or now) - run.created_at
        case ["goodput"]:
            return TimeLedger.load(run.time_ledger).share(run.finished_at or now)
    return getattr(run, name)


def text_of(value: Any) -> str:
    if isinstance(value, str):
        return value.lower()
    return {True: "true", False: "false"}[value]


def test_numbers_are_sorted_over_pages_and_absent_ones_come_last(
    database: Database, runs: RunStore, clock: ManualClock
) -> None:
    rows = fill(database, runs, clock)
    newest = sorted(rows, key=lambda run: (run.created_at, run.id), reverse=True)
    names = ("metrics.val.acc/top 1", "duration", "goodput", "step", "finished_at", "created_at")
    for name, descending in itertools.product(names, (False, True)):
        values = {run.id: key_of(run, name, clock.now) for run in rows}
        assert len(set(values.values())) > 2, name

        def key(run: RunRow) -> tuple[bool, float]:
            value = values[run.id]  # noqa: B023
            return value is None, 0.0 if value is None else -value if descending else value  # noqa: B023

        expected = [run.id for run in sorted(newest, key=key)]
        assert read(runs, RunOrder(name, descending)) == expected, (name, descending)


def test_a_field_with_values_of_every_kind_has_one_order(
    database: Database, runs: RunStore, clock: ManualClock
) -> None:
    rows = {run.id: run.spec["args"].get("x") for run in fill(database, runs, clock)}
    up = [rows[run_id] for run_id in read(runs, RunOrder("spec.args.x", False), limit=2)]
    assert up[:6] == [1e-5, 0.003, 0.5, 0.5, 7, 12] and up[-1] is None
    assert [each for each in up[6:-1] if not isinstance(each, list)] == [
        "apple",
        "auto",
        True,
        "Zebra",
    ]
    down = [rows[run_id] for run_id in read(runs, RunOrder("spec.args.x", True), limit=2)]
    assert down[:6] == [12, 7, 0.5, 0.5, 0.003, 1e-5] and down[-1] is None
    assert down[6:-1] == up[6:-1][::-1]


def test_runs_that_come_and_change_between_pages_skip_and_repeat_none(
    database: Database, runs: RunStore, clock: ManualClock
) -> None:
    rows = fill(database, runs, clock)
    order = RunOrder("duration", descending=True)
    expected = read(runs, order)
    first, after = runs.ordered(RunFilter(), order, 5)
    assert after is not None
    clock.now += 1000
    fresh, _ = runs.create(parse_spec(spec(name="new")), "tok")
    with database.write() as connection:  # a run of the first page ends
        connection.execute(
            update(table).where(table.c.id == first[0].id).values(finished_at=clock.now)
        )
    rest: list[str] = []
    while after is not None:
        heads, after = runs.ordered(RunFilter(), order, 5, after)
        rest += [head.id for head in heads]
    assert [each for each in rest if each != fresh.id] == expected[5:] and len(rows) == 12


def test_a_filter_holds_in_every_order(
    database: Database, runs: RunStore, clock: ManualClock
) -> None:
    rows = fill(database, runs, clock)
    where = RunFilter(name="run 1")
    found = read(runs, RunOrder("owner", False), limit=1, where=where)
    assert sorted(found) == sorted(run.id for run in rows if run.name == "run 1")


@pytest.mark.parametrize(
    "key", ["", "-", "color", "metrics", "metrics.", 'metrics.a"b', "spec.a..b"]
)
def test_what_cannot_be_sorted_by_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"not one of|characters"):
        RunOrder.parse(key)
