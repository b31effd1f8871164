"""For all unit tests: databases (``database_url`` is one of SQLite and one of PostgreSQL), shared
memory, and no test against the clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support import postgres_server
from tests.support.postgres_server import PostgresServer

hypothesis.settings.register_profile("everstep", deadline=None)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=15)
hypothesis.settings.load_profile("everstep")


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresServer]:
    """One server for the whole session."""
    programs = postgres_server.binaries()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install -y postgresql")
    with postgres_server.running(programs) as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'everstep.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgresql")
    with server.database() as url:
        yield url


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the test's own in place of the node's shared memory."""
    root = tmp_path / "shm"
    root.mkdir()
    for module in ("train_fn.snapshots.store", "train_fn.node.node_dir"):
        monkeypatch.setattr(f"{module}.shared_memory_root", lambda: root)
    return root
