"""How SQLite finds runs once it has looked at its tables: what is asked for all the time must not
read all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from benchmarks.api_seed import PROJECTS, seed
from everstep.wire import RunStatus
from service.db import run_lookup
from service.db.engine import Database
from service.db.projects import ProjectStore
from service.db.run_lookup import RunFilter
from service.db.runs import RunStore

NARROWED = RunFilter(
    project=PROJECTS[0], statuses=(RunStatus.SUCCEEDED,), tags=(("team", "vision"),)
)


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """400 runs, hardly any of which has not ended."""
    path: Path = tmp_path_factory.mktemp("plans") / "e.db"
    database = Database(f"sqlite:///{path}")
    database.migrate()
    seed(database, 400)
    yield database
    database.close()


def plans_of(database: Database, look: Callable[[], object]) -> list[str]:
    """How each statement of ``look`` is answered."""
    asked: list[tuple[str, Any]] = []

    def note(
        _connection: object, _cursor: object, statement: str, parameters: Any, *_: object
    ) -> None:
        asked.append((statement, parameters))

    event.listen(database._engine, "before_cursor_execute", note)
    try:
        look()
    finally:
        event.remove(database._engine, "before_cursor_execute", note)
    with database.read() as connection:
        return [
            step[3]
            for statement, parameters in asked
            if statement.startswith("SELECT")
            for step in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        ]


def test_the_few_that_have_not_ended_are_found_by_their_status(seeded: Database) -> None:
    runs = RunStore(seeded)
    looks = (
        runs.live,
        runs.live_versions,
        runs.checkpoints.awaited,
        runs.checkpoints.unended,
        ProjectStore(seeded).all,
    )
    for look in looks:
        steps = plans_of(seeded, look)
        assert any("(status=?)" in step for step in steps), steps
        assert not any(step.startswith("SCAN runs") for step in steps), steps


def test_a_tag_that_many_runs_have_is_looked_at_last(
    seeded: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = RunStore(seeded)
    by_tag = runs.page(NARROWED, 100)
    monkeypatch.setattr(run_lookup, "_MANY_TAGGED", 50)
    assert runs.page(NARROWED, 100) == by_tag != []
    assert any(
        "(project=? AND status=?)" in step
        for step in plans_of(seeded, lambda: runs.page(NARROWED, 100))
    )
