"""A database made up to date, on SQLite and on PostgreSQL, and the stores over it that most tests
ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.db.engine import Database
from service.db.events import EventStore
from service.db.runs import RunStore
from tests.support.api_service import ManualClock
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
