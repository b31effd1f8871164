"""A state in another process's memory: every bit of it is read there, or it is not used."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.one_rank import one_rank
from tests.unit.train_fn.loop.test_departure import SPEC
from tests.unit.train_fn.snapshots.test_state_file import TREES, assert_same, state_of
from train_fn.context import WorkerContext
from train_fn.node import node_dir
from train_fn.snapshots import leaving, state_file, store
from train_fn.snapshots.state_file import state_digest
from train_fn.snapshots.store import Label, snapshot_store

pytestmark = pytest.mark.skipif(not state_file.machine(), reason="needs Linux")


def context(place: Path, rank: int = 0) -> WorkerContext:
    run_dir = RunDir(open_storage(str(place / "storage")), "run_lent")
    return one_rank(SPEC, run_dir, rank=rank)


def lends_everything(shared: Path) -> None:
    """Let a state of any size be lent, and found below ``shared``."""
    leaving.SNAPSHOT_BYTES = -1
    for module in (store, node_dir):
        module.shared_memory_root = lambda: shared  # type: ignore[attr-defined]


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerContext]:
    monkeypatch.setattr(leaving, "SNAPSHOT_BYTES", -1)
    for module in (store, node_dir):
        monkeypatch.setattr(module, "shared_memory_root", lambda: tmp_path)
    yield context(tmp_path)
    leaving.write()


def labels(ctx: WorkerContext) -> list[Label]:
    return snapshot_store(ctx).labels()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tree=TREES)
def test_what_is_read_is_what_is_lent_in_every_bit_and_type(tree: Any, ctx: WorkerContext) -> None:
    state = state_of(tree)
    assert leaving.leave(ctx, state) is None and leaving.lent_step() == 7
    [label] = labels(ctx)
    assert label.digest == state_digest(state)
    assert_same(snapshot_store(ctx).read(label), state)
    assert leaving.write() is None
    snapshot_store(ctx).remove_all()


def test_a_small_state_is_written(ctx: WorkerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "SNAPSHOT_BYTES", 64 << 20)
    assert leaving.leave(ctx, state_of({})) is None
    assert leaving.lent_step() is None and leaving.write() is None
    assert_same(snapshot_store(ctx).read(labels(ctx)[0]), state_of({}))


def test_of_two_ranks_of_a_node_one_lends_the_same_state(
    ctx: WorkerContext, tmp_path: Path
) -> None:
    assert leaving.leave(ctx, state_of({})) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaving, "_loan", None)  # as in the other rank's process
        assert leaving.leave(context(tmp_path, rank=1), state_of({})) is None
        assert leaving.lent_step() is None
    assert [label.rank for label in labels(ctx)] == [0]


def test_where_nothing_can_be_lent_the_label_says_so(
    ctx: WorkerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "machine", lambda: "")
    problem = leaving.leave(ctx, state_of({}))
    assert problem is not None and problem.startswith("the state cannot be lent")
    assert [label.problem for label in labels(ctx)] == [problem] and leaving.lent_step() is None


# ---------------------------------------------------------------- two processes


class Lender:
    """Another process, which lends a state."""

    def __init__(self, place: Path) -> None:
        context_ = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context_.Pipe()
        self.process = context_.Process(target=_lend, args=(theirs, place))
        self.process.start()
        theirs.close()
        assert self.pipe.poll(100) and self.pipe.recv() == (None, 7)

    def write(self) -> None:
        """Let it write the state as its host has it do, and end."""
        self.pipe.send("write")
        assert self.pipe.poll(60) and self.pipe.recv() is None
        self.process.join(20)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _lend(pipe: Connection, place: Path) -> None:
    lends_everything(place)
    pipe.send((leaving.leave(context(place), large_state()), leaving.lent_step()))
    pipe.recv()
    pipe.send(leaving.write())


def large_state() -> dict[str, Any]:
    """Return a state of several pieces."""
    return state_of({"large": torch.arange(3_000_000), "small": torch.ones(3, dtype=torch.bool)})


@pytest.fixture
def lender(ctx: WorkerContext, tmp_path: Path) -> Iterator[Lender]:
    made = Lender(tmp_path)
    yield made
    made.kill()


@pytest.mark.slow
def test_another_process_reads_it_while_and_after_it_is_lent(
    ctx: WorkerContext, lender: Lender
) -> None:
    [label] = labels(ctx)
    assert_same(snapshot_store(ctx).read(label)["task"], large_state()["task"])
    size = snapshot_store(ctx).size_bytes()
    lender.write()
    [written] = labels(ctx)
    assert (written.step, written.digest) == (label.step, label.digest)
    assert snapshot_store(ctx).size_bytes() > 24_000_000 > size, "it was in memory only before"
    assert_same(snapshot_store(ctx).read(written)["task"], large_state()["task"])


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "while", "another has its id", "it has changed"])
def test_what_cannot_be_read_whole_is_not_used(
    when: str, ctx: WorkerContext, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    [label] = labels(ctx)
    path = snapshot_store(ctx)._state_path(label)
    copy: Callable[..., None] = state_file._copy_from
    copies: list[int] = []
    monkeypatch.setattr(state_file, "SUM_THREADS", 1)

    def copy_and_kill(pid: int, sources: Any, targets: Any) -> None:
        copy(pid, sources, targets)
        copies.append(pid)
        if len(copies) == 2:  # the token, and a first part
            lender.kill()

    if when == "before":
        lender.kill()
    elif when == "while":
        monkeypatch.setattr(state_file, "_copy_from", copy_and_kill)
    elif when == "another has its id":
        os.kill(lender.process.pid or 0, signal.SIGSTOP)
        path.write_bytes(with_pid(path.read_bytes(), os.getpid()))
    else:
        monkeypatch.setattr(state_file, "read_memory", read_another_bit(state_file.read_memory))
    with pytest.raises((OSError, ValueError)) as refused:
        snapshot_store(ctx).read(label)
    assert isinstance(refused.value, ValueError) is (when == "it has changed")
    assert len(copies) < 4 and bool(copies) is (when == "while")


def with_pid(data: bytes, pid: int) -> bytes:
    """Return what a lent state's file would say if the process had another id."""
    start = data.rindex(b'["')
    found = json.loads(data[start:])
    found[1] = pid
    return data[:start] + json.dumps(found).encode()


def read_another_bit(read: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def flipped(window: Any, tensors: Any) -> list[int]:
        first, *rest = read(window, tensors)
        return [first ^ 1, *rest]

    return flipped
