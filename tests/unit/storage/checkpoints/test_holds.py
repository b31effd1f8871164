"""Holds: what somebody reads is not deleted, whatever the order in which reader and deleter
come."""

from __future__ import annotations

from typing import Any

import pytest

from storage.checkpoints import retention as holds_module
from storage.checkpoints import retention as retention_module
from storage.checkpoints.retention import (
    ACKNOWLEDGED_HOLD_S,
    HOLD_S,
    CheckpointHold,
    SeenHolds,
    held_checkpoints,
)
from storage.checkpoints.store import CheckpointStore
from storage.errors import StorageFull
from storage.files.local import LocalFiles
from storage.filesystem import Storage
from storage.run_dir import RunDir
from tests.support.storage_places import save

pytest_plugins = ["tests.support.storage_fixtures"]


@pytest.fixture
def run_dir(any_storage: Storage) -> RunDir:
    return RunDir(any_storage, "run_a")


def test_a_held_checkpoint_stays_until_it_is_released(run_dir: RunDir) -> None:
    store = CheckpointStore(run_dir)
    old, new = save(run_dir, 10), save(run_dir, 20)
    holds = [CheckpointHold(run_dir, old.name) for _ in range(2)]
    for hold in holds:
        assert store.retain(1, None) == []
        store.verify(old.name)
        hold.release()
    assert store.retain(1, None) == [old.name]
    assert store.list() == [new]


@pytest.mark.parametrize("lasts_s", [HOLD_S, ACKNOWLEDGED_HOLD_S])
def test_a_hold_lasts_as_long_as_it_says(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, lasts_s: float
) -> None:
    now, seen = [1_000_000.0], SeenHolds()
    monkeypatch.setattr(holds_module.time, "monotonic", lambda: now[0])
    name = save(run_dir, 10).name
    CheckpointHold(run_dir, name, must_be_stored=True, lasts_s=lasts_s)
    for later_s, held in ((0, {name}), (lasts_s - 1, {name}), (2, set())):
        now[0] += later_s
        assert held_checkpoints(run_dir, seen) == held


@pytest.mark.parametrize("skew_s", [0.0, -600.0, 600.0, 7200.0])
def test_a_hold_ends_once_it_was_not_renewed_whatever_the_clocks_say(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, skew_s: float
) -> None:
    """``skew_s``: by how much the reader's wall clock is ahead of the deleter's."""
    now, seen = [1_000_000.0], SeenHolds()
    monkeypatch.setattr(holds_module.time, "monotonic", lambda: now[0])
    name = save(run_dir, 10).name
    with monkeypatch.context() as of_the_reader:
        of_the_reader.setattr(holds_module.time, "time", lambda: now[0] + skew_s)
        hold = CheckpointHold(run_dir, name)
        assert held_checkpoints(run_dir, seen) == {name}
        now[0] += HOLD_S - 1
        assert held_checkpoints(run_dir, seen) == {name}
        hold.renew()
    now[0] += HOLD_S - 1
    assert held_checkpoints(run_dir, seen) == {name}, "it was renewed"
    now[0] += HOLD_S + 1
    assert held_checkpoints(run_dir, seen) == set()
    assert run_dir.files.list(run_dir.holds_path()) == [], "what is void is removed"


def test_a_hold_that_is_taken_while_its_checkpoint_is_being_deleted(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention has looked at the holds, and a reader finds the manifest before it goes."""
    store = CheckpointStore(run_dir)
    old = save(run_dir, 10)
    save(run_dir, 20)
    looks: list[CheckpointHold] = []

    def look_then_hold(run_dir: RunDir, seen: SeenHolds) -> set[str]:
        found = held_checkpoints(run_dir, seen)
        if not looks:
            looks.append(CheckpointHold(run_dir, old.name))
        return found

    monkeypatch.setattr(retention_module, "held_checkpoints", look_then_hold)
    assert store.retain(1, None) == []
    store.verify(old.name)


def test_what_is_no_hold_holds_nothing(run_dir: RunDir) -> None:
    name = save(run_dir, 10).name
    for file, data in ((f"{name}.1", b"{}"), (f"{name}.2", b"\xff"), ("else", b"{}")):
        run_dir.files.write(run_dir.holds_path(file), data)
    assert held_checkpoints(run_dir, {}) == set()


def test_a_full_disk_can_be_read_from(
    local_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(local_storage, "run_a")
    name = save(run_dir, 10).name

    def full(*_: Any) -> None:
        raise StorageFull("no space left")

    monkeypatch.setattr(LocalFiles, "write", full)
    CheckpointHold(run_dir, name).release()
    assert held_checkpoints(run_dir, {}) == set()
