"""A copy that is taken while a run trains, put back on another home after everything of the first
one is gone: the run goes on. By the scripts of deploy/, as an operator runs them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from service.db.checkpoints import CheckpointRecords
from service.db.engine import Database
from storage.filesystem import open_storage
from storage.logs.journal import journal_events
from storage.run_dir import RunDir
from tests.support import postgres_server
from tests.support.digits_run import STEPS_PER_EPOCH
from tests.support.raw_specs import TASK
from tests.support.service_process import ServiceProcess, wait_for

DEPLOY = Path(__file__).parents[2] / "deploy"
EPOCHS = 150
SPEC = {
    "name": "digits",
    "task": TASK,
    "train": {"epochs": EPOCHS, "global_batch_size": 128, "micro_batch_size": 64},
    "scaling": {"min_workers": 1, "max_workers": 1},
    # saves and deletes all the time, which is what makes a copy hard
    "checkpoint": {"every_steps": 5, "keep_latest": 1},
}


@contextmanager
def two_databases(kind: str) -> Iterator[tuple[str | None, str | None]]:
    """Addresses of PostgreSQL databases for the service that is lost and for the one that follows;
    None is SQLite in its home."""
    if kind == "sqlite":
        yield None, None
        return
    programs = postgres_server.binaries()
    if programs is None or shutil.which("pg_dump") is None:
        pytest.skip("PostgreSQL is not installed: apt-get install -y postgresql")
    with ExitStack() as stack:
        server = stack.enter_context(postgres_server.running(programs))
        yield (
            stack.enter_context(server.database("template0")),
            stack.enter_context(server.database("template0")),
        )


def on(database: str | None) -> ServiceProcess:
    return ServiceProcess(nodes=1, args=("--database", database) if database else ())


def script(name: str, copy: Path, service: ServiceProcess, database: str | None) -> None:
    words = [copy, database or service.home / "everstep.db", service.home / "storage"]
    done = subprocess.run([DEPLOY / name, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "lacks" not in done.stderr


def lacking(storage: Path, database_url: str, run_id: str) -> set[str]:
    """The checkpoints that a database and the journal beside it name, and the storage lacks."""
    database = Database(database_url)
    try:
        named = {each.name for each in CheckpointRecords(database).kept()}
    finally:
        database.close()
    run_dir = RunDir(open_storage(str(storage)), run_id)
    for event in journal_events(run_dir):
        if event.kind == EventKind.CHECKPOINT_COMMITTED:
            named.add(event.data["name"])
        elif event.kind == EventKind.CHECKPOINT_DELETED:
            named.discard(event.data["name"])
    assert named
    there = storage / "runs" / run_id / "checkpoints"
    return {name for name in named if not (there / name / "manifest.json").exists()}


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_run_goes_on_from_a_copy_after_a_total_loss(tmp_path: Path, kind: str) -> None:
    copy = tmp_path / "copy"
    with two_databases(kind) as (first, second):
        with on(first) as lost:
            run_id = lost.client().runs.create(SPEC).id
            wait_for(lambda: lost.client().runs.get(run_id).step >= 35, 120, "step 35")
            script("backup.sh", copy, lost, first)
            token = lost.token
        assert not lost.home.exists()
        back = on(second)
        script("restore.sh", copy, back, second)
        storage, url = back.home / "storage", second or f"sqlite:///{back.home}/everstep.db"
        assert lacking(storage, url, run_id) == set()
        with back:
            client = back.client()
            client.storage.adopt()
            run = client.runs.get(run_id)
            run.wait(timeout_s=300)
            assert (run.step, run.submission) == (EPOCHS * STEPS_PER_EPOCH, 2), (
                "a new submission, from the newest checkpoint of the copy"
            )
            counted = [
                (epoch.used_once, epoch.duplicates, epoch.missing) for epoch in run.samples().epochs
            ]
            assert counted == [(1437, 0, 0)] * EPOCHS
            restored = [event.data for event in run.events() if event.kind == "restored"]
            assert restored[-1]["source"] == "checkpoint" and restored[-1]["step"] > 0
            assert back.token != token, "the home's own token is not in the copy"
