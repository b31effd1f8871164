"""A state that shared memory has no room for: the next attempt finds it on the node's disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.one_rank import one_rank
from tests.unit.train_fn.loop.test_departure import SPEC
from tests.unit.train_fn.snapshots.test_state_file import assert_same, state_of
from train_fn.context import WorkerContext
from train_fn.node import node_dir
from train_fn.snapshots import forgotten
from train_fn.snapshots.leaving import leave_snapshot
from train_fn.snapshots.store import SnapshotStore, snapshot_store


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node's temporary disk. There is no room in its shared memory."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(node_dir, "SHARED_MEMORY", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    monkeypatch.setattr(SnapshotStore, "free_bytes", lambda store: 0)
    return disk


def context(place: Path, run_id: str = "run_large") -> WorkerContext:
    return one_rank(SPEC, RunDir(open_storage(str(place / "storage")), run_id))


def state_at(step: int) -> dict[str, Any]:
    tree = {"large": torch.arange(3_000_000) * step, "small": torch.ones(3, dtype=torch.bool)}
    return {**state_of(tree), "step": step}


def files(disk: Path) -> list[Path]:
    return [path for path in disk.rglob("*") if path.is_file()]


def test_it_is_read_back_in_every_bit_and_gives_way_to_a_newer_one(
    tmp_path: Path, disk: Path
) -> None:
    ctx = context(tmp_path)
    store = snapshot_store(ctx)
    for step in (7, 8):
        assert leave_snapshot(ctx, state_at(step)) is None
        [label] = store.labels()
        assert label.step == step
        assert_same(store.read(label)["task"], state_at(step)["task"])
        [path] = files(disk)
        assert path.stat().st_size > 24_000_000 and path.stat().st_mode & 0o077 == 0
    assert store.size_bytes() == 0, "it is not in shared memory"
    store.remove_all()
    assert files(disk) == [] and store.labels() == []
    assert not list(disk.rglob("run_large"))


def test_what_nobody_can_use_is_removed_from_the_disk(tmp_path: Path, disk: Path) -> None:
    ctx = context(tmp_path)
    store = snapshot_store(ctx)
    assert leave_snapshot(ctx, state_at(7)) is None
    [path] = files(disk)
    path.with_name("s001-a001-000000008-r1.tmp").touch()  # its writer has died
    path.with_name("s001-a001-000000006-r1.pt").touch()  # before its label was there
    store.remove_after(7)
    assert files(disk) == [path]
    store.remove_after(6)
    assert files(disk) == []


def test_a_run_that_is_forgotten_leaves_nothing_on_the_disk(tmp_path: Path, disk: Path) -> None:
    ctx = context(tmp_path)
    assert leave_snapshot(ctx, state_at(7)) is None
    store = snapshot_store(ctx)
    for path in (store.directory.parent, *store.directory.parent.iterdir()):
        os.utime(path, (0, 0))
    thread = forgotten.sweep_forgotten(context(tmp_path, "run_other"))
    assert thread is not None
    thread.join()
    assert files(disk) == []


def test_where_neither_has_room_the_label_says_so(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SnapshotStore, "free_on_disk", lambda store: 1000)
    ctx = context(tmp_path)
    problem = leave_snapshot(ctx, state_at(7))
    assert problem is not None and "nor the 1000 bytes of temporary disk left" in problem
    assert [label.problem for label in snapshot_store(ctx).labels()] == [problem]
    assert files(disk) == []
