"""Survivors of one node leave their states: one after the other, and of the same state one copy."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.spec.run_spec import RunSpec
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.one_rank import one_rank
from tests.support.raw_specs import TASK
from tests.support.restore_rounds import make_state
from train_fn.context import WorkerContext
from train_fn.snapshots import leaving, state_file
from train_fn.snapshots import store as snapshot
from train_fn.snapshots.election import Candidate, elect
from train_fn.snapshots.leaving import leave_snapshot
from train_fn.snapshots.store import snapshot_store

pytestmark = [pytest.mark.own_process, pytest.mark.usefixtures("shared_memory")]

SPEC = RunSpec.model_validate(
    {
        "name": "left",
        "task": TASK,
    }
)


def ranks(tmp_path: Path, num: int) -> list[WorkerContext]:
    run_dir = RunDir(open_storage(str(tmp_path / "storage")), "run_left")
    return [one_rank(SPEC, run_dir, rank=rank) for rank in range(num)]


def states(ctx: WorkerContext) -> list[str]:
    return sorted(path.name for path in snapshot_store(ctx).directory.glob("*.pt"))


def state_at(step: int) -> dict[str, Any]:
    torch.manual_seed(0)
    state = make_state()
    state.step = step
    return state.state_dict()


def test_of_the_same_state_one_copy_is_left(tmp_path: Path) -> None:
    group, state = ranks(tmp_path, 8), state_at(7)
    with ThreadPoolExecutor(8) as pool:
        problems = list(pool.map(lambda ctx: leave_snapshot(ctx, state), group))
    assert problems == [None] * 8
    [label] = snapshot_store(group[0]).labels()
    assert len(states(group[0])) == 1 and snapshot_store(group[0]).read(label)["step"] == 7


def test_where_one_fits_and_two_do_not_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, state = ranks(tmp_path, 4), state_at(7)
    room = leaving.size_bytes(state) + leaving.OVERHEAD_BYTES
    monkeypatch.setattr(
        snapshot.SnapshotStore,
        "free_bytes",
        lambda store: 0 if list(store.directory.glob("*.pt")) else room,
    )
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda ctx: leave_snapshot(ctx, state), group)) == [None] * 4
    assert len(states(group[0])) == 1


def test_states_that_differ_are_all_left(tmp_path: Path) -> None:
    """The newest wins, and equal steps that are not equal are to be seen."""
    first, second = ranks(tmp_path, 2)
    other = state_at(7)
    other["model"] = {name: value + 1 for name, value in other["model"].items()}
    assert leave_snapshot(first, state_at(7)) is None and leave_snapshot(second, other) is None
    assert len({label.digest for label in snapshot_store(first).labels()}) == 2


def test_a_rank_that_is_stopped_in_its_turn_holds_up_nobody_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "TURN_S", 0.05)
    [ctx] = ranks(tmp_path, 1)
    directory = snapshot_store(ctx).directory
    directory.mkdir(parents=True)
    held = os.open(directory, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        assert leave_snapshot(ctx, state_at(7)) is None and len(states(ctx)) == 1
    finally:
        os.close(held)


def leave_slowly(ctx: WorkerContext, state: dict[str, Any], begun: Any) -> None:
    """Leave a state, but stop for good in the middle of its file."""
    write = state_file.write_all

    def write_half(file: Any, data: Any) -> None:
        if file.tell() > 4096:
            begun.set()
            signal.pause()
        write(file, data)

    state_file.write_all = write_half
    leave_snapshot(ctx, state)


def test_where_the_writer_is_killed_another_rank_writes_and_nothing_torn_is_elected(
    tmp_path: Path,
) -> None:
    first, second = ranks(tmp_path, 2)
    state = {**state_at(7), "task": {"large": torch.arange(1 << 20)}}
    fork = multiprocessing.get_context("fork")
    begun = fork.Event()
    writer = fork.Process(target=leave_slowly, args=(first, state, begun))
    writer.start()
    try:
        assert begun.wait(20)
        store = snapshot_store(first)
        assert store.labels() == [] and list(store.directory.glob("*.tmp"))
        with ThreadPoolExecutor(1) as pool:
            left = pool.submit(leave_snapshot, second, state)
            with pytest.raises(TimeoutError):
                left.result(0.3)  # it stands by
            writer.kill()
            assert left.result(20) is None
    finally:
        writer.kill()
        writer.join()
    [label] = store.labels()
    elected = elect([Candidate(rank, label) for rank in (0, 1)], 1).candidate
    assert elected is not None and elected.label.rank == 1
    assert torch.equal(store.read(label)["task"]["large"], state["task"]["large"])
    store.remove_after(7)
    assert sorted(path.suffix for path in store.directory.iterdir()) == [".json", ".pt"]
