"""The process that writes checkpoints: what it writes, what it says, and what comes of it when it or its rank dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from everstep.events import EventKind
from storage.checkpoints import CheckpointStore
from storage.errors import CheckpointExists, StorageError
from storage.filesystem import Storage, open_storage
from tests.unit.one_rank import journal_of
from tests.unit.ready_process import child_of, ready_process, wait_until
from tests.unit.test_train_saver import advance, make_context, make_state, weight_in
from train_fn import checkpoint_process
from train_fn.boundary_copy import BoundaryCopies
from train_fn.checkpoint_process import CheckpointProcess, ProcessUnfit
from train_fn.checkpoint_process_main import portable
from train_fn.checkpoint_write import CheckpointJob, write_checkpoint
from train_fn.processes import may_idle
from train_fn.saver import Saver
from train_fn.tensor_tree import copy_to_cpu

pytest_plugins = ["tests.unit.storage_fixtures"]
can_idle = pytest.mark.skipif(not may_idle(), reason="a process of class IDLE cannot be put back here")


@dataclass
class Heard:
    names: list[str] = field(default_factory=list)
    num_moves: int = 0

    def moved(self) -> None:
        self.num_moves += 1

    def committing(self, name: str) -> None:
        self.names.append(name)


def job(step: int, **other: Any) -> CheckpointJob:
    return CheckpointJob(**{"submission": 1, "attempt": 2, "world_size": 3, "step": step, "epoch": 0, "safetensors": True} | other)


def shared_state(step: int) -> dict[str, Any]:
    state = make_state()
    advance(state, step)
    state.metrics["accuracy"] = 0.5
    copied = copy_to_cpu(state.state_dict(), shared=True)
    copied["ema"] = {"weight": copied["model"]["weight"]}
    return dict(copied)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return open_storage(str(tmp_path / "here")).run_dir("run_x").checkpoints


@pytest.fixture
def process(store: CheckpointStore) -> Iterator[CheckpointProcess]:
    with ready_process(store) as ready:
        yield ready


def test_it_writes_what_a_thread_writes_and_tells_how_far_it_is(
    process: CheckpointProcess, store: CheckpointStore, tmp_path: Path
) -> None:
    there, state, heard = open_storage(str(tmp_path / "there")).run_dir("run_x").checkpoints, shared_state(10), Heard()
    written = process.write(job(10), state, heard)
    expected = write_checkpoint(there, job(10), state, Heard())
    assert dict(written.files) == dict(expected.files) and len(written.files) == 5
    assert (written.step, written.attempt, written.world_size, written.metrics) == (10, 2, 3, {"accuracy": 0.5})
    assert store.list() == [written]
    store.verify(written.name)
    assert heard.names == [written.name] and heard.num_moves > 0


def test_memory_is_mapped_once_and_let_go_when_it_is_not_used_any_more(process: CheckpointProcess) -> None:
    state = shared_state(1)
    process.write(job(1), state, Heard())
    maps = [len([each for each in child_of(process).memory_maps(grouped=False) if "everstep-state" in each.path])]
    for step in range(2, 6):
        state = dict(copy_to_cpu({**state, "step": step, "odd": torch.ones(step)}, state, shared=True))
        process.write(job(step), state, Heard())
        maps.append(len([each for each in child_of(process).memory_maps(grouped=False) if "everstep-state" in each.path]))
    assert max(maps) <= 3, "this state's, and at most one of the state before"
    assert child_of(process).num_fds() < 20


def test_errors_arrive_as_what_they_are(process: CheckpointProcess, store: CheckpointStore, tmp_path: Path) -> None:
    state = shared_state(10)
    process.write(job(10), state, Heard())
    with pytest.raises(CheckpointExists) as exists:
        process.write(job(10), state, heard := Heard())
    assert exists.value.name == "step-000000010.s001" and heard.names == []
    assert "checkpoint_process_main.py" in "".join(exists.value.__notes__), "where it happened"
    run = tmp_path / "here" / "runs" / "run_x"
    (run / "checkpoints").rename(run / "aside")
    (run / "checkpoints").write_text("in the way")
    with pytest.raises(StorageError):
        process.write(job(20), state, Heard())
    (run / "checkpoints").unlink()
    (run / "aside").rename(run / "checkpoints")
    process.write(job(20), state, Heard())
    assert process.retain(1, None, 1) == ["step-000000010.s001"]
    assert [manifest.step for manifest in store.list()] == [20]


class Unportable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def test_an_error_that_cannot_be_sent_is_told_in_words() -> None:
    told = portable(Unportable(1, 2))
    assert str(told) == "Unportable: 1 and 2" and type(told) is RuntimeError and told.__notes__


def test_retention_knows_what_was_found_to_be_corrupt(store: CheckpointStore) -> None:
    """A rank that fell back past a corrupt checkpoint must not take it for one of the latest."""
    for step in (10, 20, 30):
        write_checkpoint(store, job(step), shared_state(step), Heard())
    file = Path(store._run_dir.uri) / "checkpoints" / store.list()[-1].name / "model.pt"
    file.write_bytes(file.read_bytes()[:-1])
    newest, _ = store.newest_valid()
    assert newest is not None and newest.step == 20
    with ready_process(store) as process:
        process.write(job(25), shared_state(25), Heard())
        process.retain(2, None, 1)
        assert [manifest.step for manifest in store.list()] == [20, 25, 30]
        process.write(job(30), shared_state(30), Heard())  # over the corrupt one, which is sound then
        process.retain(2, None, 1)
        assert [manifest.step for manifest in store.list()] == [25, 30]


def test_it_writes_to_an_object_store(s3_storage: Storage) -> None:
    store = s3_storage.run_dir("run_x").checkpoints
    with ready_process(store) as process:
        written = process.write(job(10), shared_state(10), Heard())
        assert store.list() == [written]
        store.verify(written.name)


def test_before_it_is_ready_and_of_other_memory_it_writes_nothing(process: CheckpointProcess, store: CheckpointStore) -> None:
    early = CheckpointProcess(store)
    with pytest.raises(ProcessUnfit):
        early.write(job(10), shared_state(10), Heard())
    with pytest.raises(ProcessUnfit):
        process.write(job(10), {**shared_state(10), "more": torch.ones(3)}, Heard())
    process.write(job(10), shared_state(10), Heard())


def test_while_it_writes_training_goes_on_and_the_state_is_that_of_the_boundary(tmp_path: Path) -> None:
    ctx, state = make_context(tmp_path), make_state()
    with ready_process(ctx.run_dir.checkpoints) as process:
        saver = Saver(ctx, state, BoundaryCopies(state), process)
        child = child_of(process)
        child.suspend()
        advance(state, 10)
        saver.offer(due=True, is_best=False)
        for step in range(11, 200):
            advance(state, step)
            saver.offer(due=False, is_best=False)
        assert saver.newest_committed(0) == 0
        child.resume()
        saver.save_now()
        assert [weight_in(ctx, manifest.name) for manifest in ctx.run_dir.checkpoints.list()] == [10, 199]
        assert process._ready, "both were written by the process"
        saver.close()
        wait_until(lambda: not child.is_running())


@pytest.mark.parametrize("is_written", [False, True], ids=["before it writes", "after it has committed"])
def test_a_thread_takes_over_from_a_process_that_is_killed(tmp_path: Path, is_written: bool) -> None:
    """Also where the manifest was there and the rank had not heard of it: the checkpoint is told once, and is this save's."""
    ctx, state = make_context(tmp_path), make_state()
    with ready_process(ctx.run_dir.checkpoints) as process:
        gate = threading.Event()
        if is_written:  # the rank's thread hears of nothing until the process is dead
            answer = process._answer

            def late(connection: Connection, progress: Any) -> tuple[str, Any]:
                assert gate.wait(60)
                return answer(connection, progress)

            process._answer = late  # type: ignore[method-assign]
        saver = Saver(ctx, state, BoundaryCopies(state), process)
        child = child_of(process)
        if not is_written:
            child.suspend()
        advance(state, 10)
        saver.offer(due=True, is_best=False)
        advance(state, 11)
        if is_written:
            wait_until(lambda: bool(ctx.run_dir.checkpoints.list()))
        child.kill()
        child.wait(60)
        gate.set()
        saver.save_now()
        saver.close()
    told = journal_of(ctx)
    assert told.steps(EventKind.CHECKPOINT_COMMITTED) == [10, 11] and not told.of_kind(EventKind.CHECKPOINT_FAILED)
    assert [weight_in(ctx, manifest.name) for manifest in ctx.run_dir.checkpoints.list()] == [10, 11]


def test_a_process_that_cannot_start_leaves_the_saves_to_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, state = make_context(tmp_path), make_state()
    process = CheckpointProcess(ctx.run_dir.checkpoints)
    monkeypatch.setattr(checkpoint_process.sys, "executable", "/bin/false")
    saver = Saver(ctx, state, BoundaryCopies(state), process)
    for step in (10, 20, 30):
        advance(state, step)
        saver.offer(due=True, is_best=False)
        saver.wait_idle(time.monotonic() + 60)
        if step == 10:
            wait_until(lambda: process._process is not None)
            child_of(process).wait(60)
    saver.close()
    assert journal_of(ctx).steps(EventKind.CHECKPOINT_COMMITTED) == [10, 20, 30]


RANK = """
import sys, threading, time
from storage.filesystem import open_storage
from train_fn.checkpoint_process import CheckpointProcess
def start():
    process = CheckpointProcess(open_storage(sys.argv[1]).run_dir("run_x").checkpoints)
    process.start()
    process._give_way(idle=False)
    print(process._process.pid, flush=True)
    sys.stdin.readline()
threading.Thread(target=start, daemon=True).start()
time.sleep(600)
"""


@pytest.mark.parametrize("ends", ["rank", "thread"])
def test_it_ends_with_its_rank_and_with_the_thread_that_started_it(tmp_path: Path, ends: str) -> None:
    """Also while it is still importing, or stopped."""
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert rank.stdin is not None and rank.stdout is not None
    with rank:
        try:
            child = psutil.Process(int(rank.stdout.readline()))
            wait_until(lambda: any("torch" in each.path for each in child.memory_maps()))
            child.suspend()
            if ends == "rank":
                rank.kill()
            else:
                rank.stdin.write("end\n")
                rank.stdin.flush()
            wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
            assert ends == "rank" or rank.poll() is None
        finally:
            rank.kill()


@can_idle
def test_it_runs_in_the_class_idle_but_not_where_that_lasts_or_somebody_waits(
    process: CheckpointProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_process, "IDLE_S", 0.3)
    child, state = child_of(process), shared_state(10)

    def policy() -> int:
        return os.sched_getscheduler(child.pid)

    def written(step: int) -> threading.Thread:
        thread = threading.Thread(target=process.write, args=(job(step), state, Heard()))
        thread.start()
        return thread

    assert policy() == os.SCHED_OTHER, "as the test put it"
    process.write(job(1), state, Heard())
    assert policy() == os.SCHED_IDLE
    child.suspend()
    late = written(2)
    wait_until(lambda: policy() == os.SCHED_OTHER)
    child.resume()
    late.join(60)
    process.write(job(3), state, Heard())
    assert policy() == os.SCHED_IDLE
    process.hurry()
    assert policy() == os.SCHED_OTHER
    process.write(job(4), state, Heard())
    assert policy() == os.SCHED_OTHER


@can_idle
def test_it_starts_in_the_class_idle(store: CheckpointStore) -> None:
    process = CheckpointProcess(store)
    process.start()
    try:
        assert os.sched_getscheduler(child_of(process).pid) == os.SCHED_IDLE
        process.hurry()  # while it imports nobody waits for it
        assert os.sched_getscheduler(child_of(process).pid) == os.SCHED_IDLE
    finally:
        process.end()


def test_it_outlives_signals_that_ask_its_whole_group_to_end(process: CheckpointProcess, store: CheckpointStore) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        child_of(process).send_signal(number)
    process.write(job(10), shared_state(10), Heard())
    assert [manifest.step for manifest in store.list()] == [10]
