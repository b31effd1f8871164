"""What released versions left behind is read: their databases, checkpoints and journals."""

from __future__ import annotations

import hashlib
from importlib.metadata import version as installed
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import select

import service.annexes.registry  # noqa: F401  the tables of annexes
from everstep.wire.events import EventKind
from service.db.engine import Database
from service.db.events import EventStore
from service.db.run_lookup import find_run
from service.db.tables import metadata, runs
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from tests.support.digits_run import STEPS_PER_EPOCH
from tests.support.release_home import DATA, EPOCHS, VERSIONS, unpack_home
from train_fn.checkpoints.commit import load_checkpoint

RELEASED = {"0.1.0": "8be73841a46565e5e9a85aac3468d872153f69e72f1e265692762003814b05ea"}
"""SHA-256 of each released version's home."""


@pytest.fixture(params=VERSIONS)
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpack_home(request.param, tmp_path)


@pytest.fixture
def ids(home: Path) -> dict[str, str]:
    """Ids of the runs by name, from the migrated database."""
    database = Database(f"sqlite:///{home / 'everstep.db'}")
    database.migrate()
    with database.read() as connection:
        found = {
            name: run_id for run_id, name in connection.execute(select(runs.c.id, runs.c.name))
        }
    database.close()
    return found


def run_dir(home: Path, run_id: str) -> RunDir:
    return RunDir(open_storage(str(home / "storage")), run_id)


def test_a_database_becomes_one_of_this_version(home: Path, ids: dict[str, str]) -> None:
    database = Database(f"sqlite:///{home / 'everstep.db'}")
    with database.read() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == [], "change tables by a new migration"
        states = {name: find_run(connection, run_id) for name, run_id in ids.items()}
    assert {name: row and row.status.value for name, row in states.items()} == {
        "survivor": "SUCCEEDED",
        "paused": "PAUSED",
    }
    [failure] = EventStore(database).of_kinds(ids["survivor"], ["failure"])
    assert (failure.data["verdict"], failure.data["first_rank"]) == ("worker_lost", 1)
    database.close()


def test_checkpoints_are_verified_and_loaded(home: Path, ids: dict[str, str]) -> None:
    for run_id in ids.values():
        newest, rejected = CheckpointStore(run_dir(home, run_id)).newest_valid()
        assert newest is not None and rejected == []
        state = load_checkpoint(run_dir(home, run_id), newest)
        assert state["step"] == newest.step and state["model"]


def test_a_journal_has_every_step_once(home: Path, ids: dict[str, str]) -> None:
    events, _ = read_journal(run_dir(home, ids["survivor"]), 1, None, 100_000)
    steps = [
        point["step"]
        for event in events
        if event.kind is EventKind.METRICS
        for point in event.data["points"]
    ]
    assert sorted(set(steps)) == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    assert [event.data["verdict"] for event in events if event.kind is EventKind.FAILURE] == [
        "worker_lost"
    ]


def test_what_a_release_left_behind_stays_as_it_was() -> None:
    """A change of a table, a journal or a checkpoint needs a migration and a new version, and not a
    new home of the old one."""
    digests = {
        version: hashlib.sha256((DATA / version / "home.tar.xz").read_bytes()).hexdigest()
        for version in RELEASED
    }
    assert digests == RELEASED


def test_this_version_is_among_them() -> None:
    assert installed("everstep") in VERSIONS, "run python -m tests.support.release_home"
