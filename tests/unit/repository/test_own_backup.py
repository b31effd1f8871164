"""deploy/backup.sh and deploy/restore.sh of a service's own database and storage: made while others
write, never over anything, whole when taken back."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.spec.parsing import parse_spec
from service.db.engine import Database
from service.db.run_lookup import RunFilter
from service.db.runs import RunStore
from tests.support.api_service import spec
from tests.support.postgres_server import PostgresServer

DEPLOY = Path(__file__).parents[3] / "deploy"


def script(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [DEPLOY / name, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


def done(name: str, *words: object) -> str:
    ended = script(name, *words)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def url_of(database: Path | str) -> str:
    return database if isinstance(database, str) else f"sqlite:///{database}"


def names(database: Path | str) -> list[str]:
    opened = Database(url_of(database))
    try:
        return sorted(run.name for run in RunStore(opened).find(RunFilter(), 10_000))
    finally:
        opened.close()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A SQLite database with one run."""
    path = tmp_path / "everstep.db"
    opened = Database(url_of(path))
    opened.migrate()
    RunStore(opened).create(parse_spec(spec(name="first")), "me")
    opened.close()
    return path


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A storage with an archive of code and one run's journal."""
    root = tmp_path / "storage"
    events = root / "runs" / "run_a" / "events"
    events.mkdir(parents=True)
    (events / "s001.jsonl").touch()
    (root / "code").mkdir()
    (root / "code" / "archive-0").write_bytes(b"x" * 4096)
    return root


class Training:
    """Runs that are created, and a run that commits a checkpoint after the other and keeps the
    newest one alone, with a journal that says so."""

    def __init__(self, database: Path | str, storage: Path) -> None:
        self._database, self._run = database, storage / "runs" / "run_a"
        self._stop, self._begun = threading.Event(), threading.Barrier(3)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        threads = [threading.Thread(target=each) for each in (self._create, self._train)]
        for thread in threads:
            thread.start()
        self._begun.wait(60)
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _create(self) -> None:
        opened = Database(url_of(self._database))
        for number in itertools.count():
            RunStore(opened).create(parse_spec(spec(name=f"run {number:05d}")), "me")
            if number == 0:
                self._begun.wait(60)
            if self._stop.wait(0.02):
                return opened.close()

    def _train(self) -> None:
        """Faster than a machine copies, and then ever slower: however busy it is, a copy ends."""
        began = time.monotonic()
        for step in itertools.count():
            name = self._name(step)
            directory = self._run / "checkpoints" / name
            directory.mkdir(parents=True)
            for part in ("model.pt", "optimizer.pt"):
                (directory / part).write_bytes(name.encode() * 2000)
            (directory / ".manifest").write_text("{}")
            (directory / ".manifest").rename(directory / "manifest.json")
            self._tell("checkpoint_committed", name)
            if step:
                last = self._run / "checkpoints" / self._name(step - 1)
                (last / "manifest.json").unlink()
                shutil.rmtree(last)
                self._tell("checkpoint_deleted", last.name)
            if step == 1:
                self._begun.wait(60)
            if self._stop.wait(0.02 + 0.05 * (time.monotonic() - began)):
                return

    def _tell(self, kind: str, name: str) -> None:
        event = {"n": 1, "kind": kind, "data": {"name": name}}
        with (self._run / "events" / "s001.jsonl").open("a") as journal:
            journal.write(json.dumps(event, separators=(",", ":")) + "\n")

    @staticmethod
    def _name(step: int) -> str:
        return f"step-{step:09d}.s001.a001"


def named_by_the_journal(storage: Path) -> set[str]:
    """The checkpoints that a run's journal says to be there."""
    found: set[str] = set()
    for line in (storage / "runs" / "run_a" / "events" / "s001.jsonl").read_text().splitlines():
        event = json.loads(line)
        act = found.add if event["kind"] == "checkpoint_committed" else found.discard
        act(event["data"]["name"])
    return found


def is_whole(checkpoint: Path) -> bool:
    return (checkpoint / "manifest.json").exists() and all(
        (checkpoint / part).read_bytes() == checkpoint.name.encode() * 2000
        for part in ("model.pt", "optimizer.pt")
    )


def check_a_copy_taken_while_others_write(
    tmp_path: Path, database: Path | str, storage: Path, empty: Path | str
) -> None:
    for number in range(1000):  # so that the copy takes a while
        (storage / "code" / f"archive-{number}").write_bytes(b"x" * 4096)
    with Training(database, storage).going_on():
        said = done("backup.sh", tmp_path / "copy", database, storage)
    assert "lacks" not in said
    back = tmp_path / "back"
    done("restore.sh", tmp_path / "copy", empty, back)
    copied = names(empty)
    assert copied == ["first", *(f"run {number:05d}" for number in range(len(copied) - 1))], (
        "a prefix of what was written"
    )
    named = named_by_the_journal(back)
    checkpoints = back / "runs" / "run_a" / "checkpoints"
    assert named and all(is_whole(checkpoints / name) for name in named)
    manifests = [path.parent for path in checkpoints.glob("*/manifest.json")]
    assert all(map(is_whole, manifests)), "and so is every other that has a manifest"
    assert len(list((back / "code").iterdir())) == 1000


def test_a_copy_of_sqlite_taken_while_others_write_is_one_moment(
    tmp_path: Path, database: Path, storage: Path
) -> None:
    empty = tmp_path / "home" / "everstep.db"
    check_a_copy_taken_while_others_write(tmp_path, database, storage, empty)
    assert empty.stat().st_mode & 0o077 == 0 and (tmp_path / "copy").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_a_copy_of_postgresql_taken_while_others_write_is_one_moment(
    tmp_path: Path, postgresql: PostgresServer, storage: Path
) -> None:
    if shutil.which("pg_dump") is None:
        pytest.skip("pg_dump is not installed: apt-get install -y postgresql-client")
    with postgresql.database() as url, postgresql.database("template0") as empty:
        opened = Database(url)
        RunStore(opened).create(parse_spec(spec(name="first")), "me")
        opened.close()
        check_a_copy_taken_while_others_write(tmp_path, url, storage, empty)
        for target, named in (
            (empty, "has tables already"),
            (tmp_path / "x.db", "PostgreSQL database"),
        ):
            ended = script("restore.sh", tmp_path / "copy", target)
            assert ended.returncode != 0 and named in ended.stderr


def test_a_run_that_ended_long_ago_is_copied_whole(
    tmp_path: Path, database: Path, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By names from where the operator stands."""
    run = storage / "runs" / "run_a"
    checkpoint = run / "checkpoints" / "step-000000001.s001.a001"
    checkpoint.mkdir(parents=True)
    for path in (checkpoint / "model.pt", checkpoint / "manifest.json", run / "spec.json"):
        path.write_text("{}")
    for path in [storage, *storage.rglob("*")]:
        os.utime(path, (1e9, 1e9))
    monkeypatch.chdir(tmp_path)
    done("backup.sh", "copy", database.name, storage.name)
    done("restore.sh", "copy", "home/everstep.db", "home/storage")

    def files(root: Path) -> list[Path]:
        return sorted(path.relative_to(root) for path in root.rglob("*"))

    assert files(tmp_path / "home" / "storage") == files(storage)
    assert names(tmp_path / "home" / "everstep.db") == ["first"]


def test_nothing_is_overwritten(tmp_path: Path, database: Path, storage: Path) -> None:
    done("backup.sh", tmp_path / "copy", database, storage)
    ended = script("backup.sh", tmp_path / "copy", database, storage)
    assert ended.returncode != 0 and "never overwrites" in ended.stderr
    for target, place, named in (
        (tmp_path / "new.db", storage, "is not empty"),
        (database, tmp_path / "new", "already exists"),
        ("postgresql://nowhere/x", tmp_path / "new", "SQLite database"),
    ):
        ended = script("restore.sh", tmp_path / "copy", target, place)
        assert ended.returncode != 0 and named in ended.stderr
        assert not (tmp_path / "new").exists() and not (tmp_path / "new.db").exists()
    assert names(database) == ["first"]


def test_a_copy_that_is_damaged_is_refused(tmp_path: Path, database: Path) -> None:
    done("backup.sh", tmp_path / "copy", database)
    copied = tmp_path / "copy" / "everstep.db"
    data = bytearray(copied.read_bytes())
    data[5000] ^= 1
    copied.write_bytes(data)
    ended = script("restore.sh", tmp_path / "copy", tmp_path / "new.db")
    assert ended.returncode != 0 and "is damaged" in ended.stderr
    assert not (tmp_path / "new.db").exists()


def test_a_database_that_is_not_one_leaves_no_copy(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database\n" * 1000)
    for database in (tmp_path / "none", tmp_path / "text", "postgresql://127.0.0.1:9/none"):
        ended = script("backup.sh", tmp_path / "copy", database)
        assert ended.returncode != 0 and ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_only_a_copy_with_its_storage_counts_as_the_newest_database(
    tmp_path: Path, database: Path, storage: Path
) -> None:
    """A database alone may be older than the storage that is there, which must then be noticed."""

    def generation(path: Path) -> int:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            [found] = connection.execute("SELECT generation FROM storage_identity").fetchone()
        return int(found)

    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute(
            "INSERT INTO storage_identity (name, storage_id, recorded_at, generation) "
            "VALUES ('runs', 'an-id', 0, 7)"
        )
    done("backup.sh", tmp_path / "copy", database, storage)
    done("restore.sh", tmp_path / "copy", tmp_path / "both.db", tmp_path / "back")
    done("restore.sh", tmp_path / "copy", tmp_path / "alone.db")
    assert (generation(tmp_path / "both.db"), generation(tmp_path / "alone.db")) == (1007, 7)


def test_a_file_that_cannot_be_read_leaves_no_copy(
    tmp_path: Path, database: Path, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "x: Read error at byte 0: Input/output error", "y: Cannot open: Permission denied"
    tar, real = tmp_path / "tar", shutil.which("tar")
    tar.write_text(f"#!/bin/sh\n{real} \"$@\"\nprintf '%s\\n' '{said[0]}' '{said[1]}' >&2\n")
    tar.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ended = script("backup.sh", tmp_path / "copy", database, storage)
    assert ended.returncode != 0 and f"cannot be copied: {said[0]}" in ended.stderr
    assert f"left out: {said[1]}" in ended.stderr and not (tmp_path / "copy").exists()


def test_nothing_that_a_run_plants_is_followed_or_stops_a_copy(
    tmp_path: Path, database: Path, storage: Path
) -> None:
    outside, run = tmp_path / "keys", storage / "runs" / "run_a"
    outside.mkdir()
    (outside / "id_rsa").write_text("private")
    (storage / "planted").symlink_to(outside)
    (run / "model.pt").symlink_to(outside / "id_rsa")
    (run / "events" / "linked").symlink_to(outside)
    (run / ".draft").write_bytes(b"half")
    os.mkfifo(storage / "pipe")
    os.mkfifo(run / "events" / "s002.jsonl")
    with (run / "huge").open("wb") as file:
        file.truncate(1 << 40)
    said = done("backup.sh", tmp_path / "copy", database, storage)
    copied = tmp_path / "copy" / "storage"
    found = {path.name for path in copied.rglob("*") if path.parent.name != "code"}
    assert found == {"runs", "run_a", "events", "s001.jsonl", "huge", "code"}
    assert (copied / "runs" / "run_a" / "huge").stat().st_blocks < 100
    assert "left out, no regular file: planted" in said and "pipe" in said
    (storage / "runs").rename(tmp_path / "disk")
    (storage / "runs").symlink_to(tmp_path / "disk")
    ended = script("backup.sh", tmp_path / "other", database, storage)
    assert ended.returncode != 0 and "runs is a link" in ended.stderr
