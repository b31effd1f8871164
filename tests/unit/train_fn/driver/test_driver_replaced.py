"""A driver that slept while another took over: it stops before it touches anything that is no
longer its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from storage.checkpoints.store import CheckpointStore
from storage.filesystem import Storage, open_storage
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from tests.support.storage_places import memory_run_dir, record_restored, save
from train_fn.driver import fit_loop as watch_module
from train_fn.driver.fit_loop import EXIT_REPLACED, ControlWatch
from train_fn.driver.supervision import Driver
from train_fn.errors import Replaced
from train_fn.recovery.outcome import Stopping
from train_fn.recovery.settings import RecoverySettings

pytest_plugins = ["tests.support.storage_fixtures"]


def take_over(run_dir: RunDir) -> None:
    JournalWriter(run_dir, 2).close()


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(RunDir(open_storage(str(tmp_path)), "run_a"), 1, RecoverySettings())


@pytest.fixture
def watch(tmp_path: Path) -> ControlWatch:
    """What a driver watches; no stop comes, so that the journal is never called."""
    run_dir = RunDir(open_storage(str(tmp_path)), "run_a")
    return ControlWatch(run_dir, 1, cast(Any, None), Stopping(None))


def test_it_does_not_begin(driver: Driver) -> None:
    take_over(driver._run_dir)
    with pytest.raises(
        Replaced, match="submission 2 of run run_a has taken over from submission 1"
    ):
        driver.run()


def test_it_ends_when_it_finds_itself_replaced(
    watch: ControlWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "FENCE_POLL_S", 0.0)
    monkeypatch.setattr(watch_module, "STOP_POLL_S", 0.01)

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    take_over(watch._run_dir)
    with pytest.raises(SystemExit) as left:
        watch.watch_stops()
    assert left.value.code == EXIT_REPLACED


@pytest.mark.timeout(20)
def test_a_storage_that_does_not_answer_replaces_nobody(
    watch: ControlWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "FENCE_POLL_S", 0.0)
    monkeypatch.setattr(watch_module, "STOP_POLL_S", 0.01)
    (Path(watch._run_dir.storage.uri) / "runs").symlink_to("runs")  # every look ends with an error
    monkeypatch.setattr(watch_module.logger, "warning", lambda *_: watch._done.set())
    watch.watch_stops()


def lineage_bytes(run_dir: RunDir) -> dict[str, bytes]:
    """Every byte of the lineage."""
    store = CheckpointStore(run_dir)
    return {
        f"{manifest.name}/{relpath}": store.read_file(manifest.name, relpath)
        for manifest in store.lineage()
        for relpath in manifest.files
    }


@pytest.mark.parametrize("place", ["local", "objects"])
def test_what_it_was_writing_when_it_fell_asleep_changes_no_byte_of_the_lineage(
    place: str, local_storage: Storage
) -> None:
    """Also on an object store without conditional writes: nothing but names fences."""
    run_dir = RunDir(local_storage, "run_a") if place == "local" else memory_run_dir()[0]
    store = CheckpointStore(run_dir)
    JournalWriter(run_dir, 1).close()
    save(run_dir, 50, 1)
    asleep = store.begin(100, 1, 1)
    with asleep.write_file("model.pt") as file:
        file.write(b"what the old one had at 100")
    record_restored(run_dir, 2, 50)
    save(run_dir, 100, 2)
    before = lineage_bytes(run_dir)
    assert set(before) == {
        f"step-000000{step}.s00{n}.a001/{file}"
        for step, n in (("050", 1), ("100", 2))
        for file in ("model.pt", "train_state.pt")
    }

    asleep.commit(epoch=0, parent=None, world_size=1, sample_digest=None, metrics={})
    save(run_dir, 150, 1)
    assert CheckpointStore(RunDir(run_dir.storage, run_dir.run_id)).retain(1, None, (1, 1)) == [], (
        "it deletes nothing"
    )
    assert lineage_bytes(run_dir) == before
    save(run_dir, 150, 2)
    store.retain(2, None, (2, 1))
    names = {name.split("/")[0] for name in lineage_bytes(run_dir)}
    assert names == {"step-000000100.s002.a001", "step-000000150.s002.a001"}


WRITER = """
import itertools, sys
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.storage_places import save
run_dir = RunDir(open_storage(sys.argv[1]), "run_a")
for step in itertools.count(50, 50):
    save(run_dir, step, between=lambda point: print(step, point, flush=True))
"""


@pytest.mark.slow
def test_a_process_that_sleeps_in_the_middle_of_a_save_and_wakes_up_after_a_takeover(
    any_storage: Storage,
) -> None:
    """A real SIGSTOP and SIGCONT, on S3 without conditional writes too."""
    run_dir = RunDir(any_storage, "run_a")
    JournalWriter(run_dir, 1).close()
    asleep = subprocess.Popen(
        [sys.executable, "-c", WRITER, any_storage.uri],
        cwd=Path(__file__).parents[4],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert asleep.stdout is not None

    def until(words: str) -> None:
        assert words in (line.strip() for line in iter(asleep.stdout.readline, "")), "it has died"  # type: ignore[union-attr]

    try:
        until("100 committed")
        until("150 inside model.pt")
        asleep.send_signal(signal.SIGSTOP)
        record_restored(run_dir, 2, 100)
        save(run_dir, 150, 2)
        save(run_dir, 200, 2)
        before = lineage_bytes(run_dir)
        assert {name.split("/")[0][-14:] for name in before} == {
            "0050.s001.a001",
            "0100.s001.a001",
            "0150.s002.a001",
            "0200.s002.a001",
        }
        asleep.send_signal(signal.SIGCONT)
        until("300 committed")
    finally:
        asleep.kill()
        asleep.wait()
        asleep.stdout.close()
    again = RunDir(run_dir.storage, run_dir.run_id)
    store = CheckpointStore(again)
    assert [each.step for each in store.list() if each.submission == 1][-1] >= 300, "it went on"
    assert lineage_bytes(again) == before
    newest, rejected = store.newest_valid()
    assert newest is not None and newest.name == "step-000000200.s002.a001" and rejected == []
