"""Copies of a service's database and storage: made while others write, never over anything, whole
when taken back."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from everstep.spec.parsing import parse_spec
from service.annexes.backup import tree_copy
from service.annexes.backup.__main__ import main
from service.annexes.backup.copies import MANIFEST, BackupError, create, restore
from service.annexes.backup.tree_copy import LinkedRoot
from service.db.engine import Database, DatabaseError
from service.db.run_lookup import RunFilter
from service.db.runs import RunStore
from service.settings import HomeError, HomeLock, Settings
from tests.support.api_service import spec
from tests.support.postgres_server import PostgresServer


@pytest.fixture
def served(tmp_path: Path) -> Settings:
    """A home with one run, and something in its storage."""
    settings = Settings(home=tmp_path / "home")
    database = Database(settings.database_url)
    database.migrate()
    RunStore(database).create(parse_spec(spec(name="first")), "me")
    database.close()
    run = Path(settings.storage_uri) / "runs" / "run_a"
    (run / "events").mkdir(parents=True)
    (run / "events" / "s001.jsonl").write_bytes(b'{"n":1}\n')
    (run / ".draft.tmp").write_bytes(b"half")
    (run / "model.pt").symlink_to("/etc/passwd")
    return settings


def names(settings: Settings) -> list[str]:
    database = Database(settings.database_url)
    try:
        return sorted(run.name for run in RunStore(database).find(RunFilter(), 10_000))
    finally:
        database.close()


def test_a_copy_taken_while_others_write_is_one_moment_of_the_database(
    served: Settings, tmp_path: Path
) -> None:
    database = Database(served.database_url)
    runs, stop, begun = RunStore(database), threading.Event(), threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            runs.create(parse_spec(spec(name=f"run {number:05d}")), "me")
            number += 1
            begun.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert begun.wait(60)
        made = create(served, tmp_path / "copy")
    finally:
        stop.set()
        writer.join()
        database.close()
    there = Settings(home=tmp_path / "other")
    back = restore(there, tmp_path / "copy")
    copied = names(there)
    assert copied == ["first", *(f"run {number:05d}" for number in range(len(copied) - 1))], (
        "a prefix of what was written"
    )
    assert back.num_runs == len(copied) and made.missing == back.missing == ()
    run = Path(there.storage_uri) / "runs" / "run_a"
    assert (run / "events" / "s001.jsonl").read_bytes() == b'{"n":1}\n'
    assert {path.name for path in run.iterdir()} == {"events"}, (
        "drafts are nobody's, and links lead anywhere"
    )
    assert (there.home / "everstep.db").stat().st_mode & 0o077 == 0


def test_a_copied_journal_tells_of_no_checkpoint_that_was_committed_after_it_was_copied(
    served: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(served.storage_uri) / "runs" / "run_a"
    for name in ("checkpoints/step-000000001.s001.a001", "logs", "profiles"):
        (run / name).mkdir(parents=True)
        (run / name / "file").touch()
    copied: list[str] = []
    copy = tree_copy._copy_file

    def note(directory: int, source: Path, *more: Any) -> None:
        copied.append(str(source))
        copy(directory, source, *more)

    monkeypatch.setattr(tree_copy, "_copy_file", note)
    create(served, tmp_path / "copy")
    assert any("/events/" in path for path in copied[:-1]) and "/checkpoints/" in copied[-1]


def test_nothing_is_overwritten_and_no_running_service_is_disturbed(
    served: Settings, tmp_path: Path
) -> None:
    create(served, tmp_path / "copy")
    with pytest.raises(BackupError, match="never overwritten"):
        create(served, tmp_path / "copy")
    with pytest.raises(BackupError, match="not empty"):
        restore(served, tmp_path / "copy")
    shutil.rmtree(served.storage_uri)
    with pytest.raises(BackupError, match=r"everstep\.db already exists"):
        restore(served, tmp_path / "copy")
    other = Settings(home=tmp_path / "other")
    with HomeLock(other), pytest.raises(HomeError, match="already runs"):
        restore(other, tmp_path / "copy")


def test_a_copy_that_was_damaged_or_never_finished_is_refused(
    served: Settings, tmp_path: Path
) -> None:
    copy, other = tmp_path / "copy", Settings(home=tmp_path / "other")
    create(served, copy)
    data = bytearray((copy / "everstep.db").read_bytes())
    data[5000] ^= 1
    (copy / "everstep.db").write_bytes(data)
    with pytest.raises(BackupError, match="digest does not match"):
        restore(other, copy)
    (copy / MANIFEST).unlink()
    with pytest.raises(BackupError, match="is not a backup"):
        restore(other, copy)


@pytest.mark.parametrize("url", ["nonsense", "mysql://host/name"])
def test_a_database_that_is_not_served_is_neither_copied_nor_put_back(
    served: Settings, tmp_path: Path, url: str
) -> None:
    other = Settings(home=tmp_path / "other", database_url=url)
    with pytest.raises(DatabaseError, match="sqlite:///PATH"):
        create(other, tmp_path / "none", with_storage=False)
    create(served, tmp_path / "copy", with_storage=False)
    with pytest.raises(DatabaseError, match="sqlite:///PATH"):
        restore(other, tmp_path / "copy")
    assert not [path.name for path in tmp_path.iterdir() if "none" in path.name], (
        "nothing is left of it"
    )


def test_an_object_store_is_the_bucket_s_own_matter(served: Settings, tmp_path: Path) -> None:
    there = Settings(home=served.home, storage_uri="s3://bucket/everstep")
    with pytest.raises(BackupError, match="--database-only"):
        create(there, tmp_path / "copy")


@pytest.mark.slow
def test_postgresql_is_copied_by_its_own_programs(
    postgresql: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("pg_dump") is None:
        pytest.skip("pg_dump is not installed: apt-get install -y postgresql-client")
    with postgresql.database() as url, postgresql.database("template0") as empty:
        served = Settings(home=tmp_path / "home", database_url=url)
        database = Database(url)
        RunStore(database).create(parse_spec(spec(name="first")), "me")
        database.close()
        Path(served.storage_uri).mkdir(parents=True)
        create(served, tmp_path / "copy")
        there = Settings(home=tmp_path / "other", database_url=empty)
        assert restore(there, tmp_path / "copy").num_runs == 1
        assert names(there) == ["first"]
        with pytest.raises(BackupError, match="PostgreSQL"):
            restore(Settings(home=tmp_path / "third"), tmp_path / "copy")


def test_the_command_line(
    served: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EVERSTEP_HOME", str(served.home))
    assert main(["create", str(tmp_path / "copy")]) == 0
    assert "1 runs, 0 checkpoints" in capsys.readouterr().out
    assert main(["restore", str(tmp_path / "copy")]) == 1
    assert "everstep restore:" in capsys.readouterr().err


def test_the_database_may_be_named_in_a_file(
    served: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "url").write_text(f"{served.database_url}\n")
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("EVERSTEP_DATABASE_FILE", str(tmp_path / "url"))
    assert main(["create", str(tmp_path / "copy"), "--storage", served.storage_uri]) == 0
    assert "1 runs, 0 checkpoints" in capsys.readouterr().out
    monkeypatch.setenv("EVERSTEP_DATABASE_FILE", str(tmp_path / "none"))
    assert main(["create", str(tmp_path / "other"), "--storage", served.storage_uri]) == 1


def test_nothing_that_a_run_plants_is_followed_or_stops_a_copy(
    served: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A link at the storage's root was followed (a private key was copied), and any FIFO ended the
    backup."""
    outside, root = tmp_path / "keys", Path(served.storage_uri)
    outside.mkdir()
    (outside / "id_rsa").write_text("private")
    (root / "planted").symlink_to(outside)
    (root / "planted-file").symlink_to(outside / "id_rsa")
    (root / "runs" / "run_a" / "events" / "linked").symlink_to(outside)
    os.mkfifo(root / "pipe")
    os.mkfifo(root / "runs" / "run_a" / "events" / "s002.jsonl")
    with (root / "runs" / "run_a" / "huge").open("wb") as file:
        file.truncate(1 << 40)
    made = create(served, tmp_path / "copy")
    copied = tmp_path / "copy" / "storage"
    assert not list(copied.rglob("id_rsa")) and not [
        path for path in copied.rglob("*") if path.is_symlink()
    ]
    assert {path.name for path in copied.rglob("*") if not path.is_dir()} >= {"s001.jsonl", "huge"}
    assert (copied / "runs" / "run_a" / "huge").stat().st_blocks == 0
    assert made.num_skipped == 6 and any(
        "pipe: not a regular file" in words for words in made.skipped
    )
    assert any("planted: a link" in words for words in made.skipped)
    monkeypatch.setenv("EVERSTEP_HOME", str(served.home))
    assert main(["create", str(tmp_path / "told")]) == 0
    assert "left out: 6 links" in capsys.readouterr().out


def test_an_operators_own_link_is_followed_where_it_is_named(
    served: Settings, tmp_path: Path
) -> None:
    root = Path(served.storage_uri)
    (root / "runs").rename(tmp_path / "disk")
    (root / "runs").symlink_to(tmp_path / "disk")
    with pytest.raises(LinkedRoot, match="give --follow runs"):
        create(served, tmp_path / "copy")
    create(served, tmp_path / "copy", follow=["runs"])
    assert (
        tmp_path / "copy" / "storage" / "runs" / "run_a" / "events" / "s001.jsonl"
    ).read_bytes() == b'{"n":1}\n'
