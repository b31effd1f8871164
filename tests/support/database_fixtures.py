"""A database made up to date, on SQLite and on PostgreSQL, and the stores over it that most tests
ask for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from alembic import command

from service.db.engine import Database
from service.db.events import EventStore
from service.db.runs import RunStore
from tests.support.api_service import ManualClock
from tests.support.postgres_server import PostgresServer
from tests.support.prepared_database import prepared_database


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = prepared_database(database_url)
    yield database
    database.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def runs(database: Database, clock: ManualClock) -> RunStore:
    return RunStore(database, clock)


@pytest.fixture
def events(database: Database, clock: ManualClock) -> EventStore:
    return EventStore(database, clock)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def old_database(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Database]:
    """A database of 0.1.0, with sweeps and a table of webhooks."""
    with ExitStack() as stack:
        url = f"sqlite:///{tmp_path / 'e.db'}"
        if request.param == "postgresql":
            server: PostgresServer = request.getfixturevalue("postgresql")
            url = stack.enter_context(server.database("template0"))
        database = Database(url)
        stack.callback(database.close)
        upgrade = command.upgrade
        with monkeypatch.context() as patch:
            patch.setattr(command, "upgrade", lambda config, _: upgrade(config, "0001"))
            database.migrate()
        yield database
