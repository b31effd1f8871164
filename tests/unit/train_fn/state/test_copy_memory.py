"""Memory for copies is pinned beside training, and what is copied is one step's all the same.

A CPU pins nothing: plain memory that a test hands out stands for what is pinned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.saves import advance, make_context, make_state
from tests.unit.train_fn.snapshots.test_whole import make_publisher
from train_fn.checkpoints.save_slot import BoundaryCopies
from train_fn.checkpoints.saver import Saver
from train_fn.snapshots import whole as whole_module
from train_fn.snapshots.store import snapshot_store
from train_fn.state import tensor_tree
from train_fn.state.run_state import CopyMemory
from train_fn.state.tensor_tree import copy_to_cpu

pytestmark = pytest.mark.own_process

DEADLINE_S = 20.0


class Pinning:
    """Hands out memory once ``open`` is set, and notes who asked for how many elements."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.error: Exception | None = None
        self.by_training: list[int] = []
        self.beside: list[torch.Tensor] = []

    def new_memory(self, shape: Any, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        memory = torch.full(tuple(shape), -1, dtype=dtype)
        if threading.current_thread().name != "copy-memory":
            self.by_training.append(memory.numel())
            return memory
        assert self.open.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        self.beside.append(memory)
        return memory

    def end(self) -> None:
        """Let the thread take what it wants, and wait for its end."""
        self.open.set()
        for thread in threading.enumerate():
            if thread.name == "copy-memory":
                thread.join(DEADLINE_S)
                assert not thread.is_alive()


@pytest.fixture
def pinning(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pinning]:
    pinning = Pinning()
    monkeypatch.setattr(tensor_tree, "needs_pinning", lambda tensor: True)
    monkeypatch.setattr(tensor_tree, "new_memory", pinning.new_memory)
    monkeypatch.setattr(whole_module, "COST_RATIO", 0.0)
    yield pinning
    pinning.end()


def test_steps_go_on_while_memory_is_pinned_and_the_copy_is_of_one_later_step(
    tmp_path: Path, pinning: Pinning
) -> None:
    ctx, state = make_context(tmp_path), make_state()
    publisher = make_publisher(ctx, state)
    for step in (1, 2):
        advance(state, step)
        publisher.after_step()  # returns, though no memory is there
    pinning.end()
    assert all((memory == 0).all() for memory in pinning.beside), "nothing is copied ahead"
    advance(state, 3)
    publisher.after_step()
    advance(state, 4)
    with publisher._lock:
        assert publisher._lock.wait_for(lambda: publisher._waiting is None, DEADLINE_S)
    publisher.close()
    store = snapshot_store(ctx)
    [label] = store.labels()
    assert label.step == 3
    assert torch.equal(store.read(label)["model"]["weight"], torch.full((2, 2), 3.0))
    assert pinning.by_training == []
    assert sum(memory.numel() for memory in pinning.beside) == 6, "one state's, and no more"


def test_a_first_save_finds_memory_where_nothing_is_published(
    tmp_path: Path, pinning: Pinning
) -> None:
    ctx, state = make_context(tmp_path), make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    advance(state, 1)
    saver.offer(due=False, is_best=False)
    pinning.end()
    advance(state, 2)
    saver.offer(due=True, is_best=False)
    assert saver.wait_idle(time.monotonic() + DEADLINE_S)
    saver.close()
    assert [each.step for each in ctx.checkpoints.list()] == [2]
    assert pinning.by_training == []


def test_a_copy_that_cannot_wait_uses_what_the_thread_takes(pinning: Pinning) -> None:
    state = make_state()
    copies = BoundaryCopies(state)
    advance(state, 1)
    assert not copies.is_ready()
    found: list[Any] = []
    taking = threading.Thread(target=lambda: found.append(copies.take()))
    taking.start()
    taking.join(0.05)
    assert taking.is_alive() and not found
    pinning.end()
    taking.join(DEADLINE_S)
    assert float(found[0].state["model"]["weight"][0, 0]) == 1
    memory = {each.data_ptr() for each in pinning.beside}
    assert {each.data_ptr() for each in found[0].state["model"].values()} <= memory
    assert pinning.by_training == []


def test_only_what_a_state_has_gained_is_pinned(pinning: Pinning) -> None:
    pinning.open.set()
    memory, weight = CopyMemory(), torch.ones(3)
    first = copy_to_cpu({"model": weight}, memory.take())
    memory.put(first)
    assert memory.is_ready(lambda: {"model": weight})
    grown = {"model": weight, "moments": [torch.ones(5), 1], "odd": (torch.ones(7),)}
    assert not memory.is_ready(lambda: grown)
    pinning.end()
    assert memory.is_ready(lambda: grown)
    copied = copy_to_cpu(grown, memory.take())
    assert copied["model"] is first["model"]
    assert [each.numel() for each in pinning.beside] == [5, 7]
    assert (copied["moments"][0] == 1).all() and (copied["odd"][0] == 1).all()


def test_where_no_thread_may_pin_the_copy_does_so_itself(
    pinning: Pinning, caplog: pytest.LogCaptureFixture
) -> None:
    pinning.error = RuntimeError("operation not permitted while a stream is captured")
    state = make_state()
    copies = BoundaryCopies(state)
    advance(state, 1)
    assert not copies.is_ready()
    pinning.end()
    assert copies.is_ready() and "not permitted" in caplog.text
    assert copies.take().step == 1
    assert sum(pinning.by_training) == 6


def test_a_cpu_takes_memory_ahead_for_what_is_large() -> None:
    memory, small = CopyMemory(), torch.ones(5)
    assert memory.is_ready(lambda: {"model": small})
    state = {"model": small, "moments": torch.ones(1 << 18)}
    assert not memory.is_ready(lambda: state)
    taken = memory.take()["moments"]
    assert (taken == 0).all()
    copied = copy_to_cpu(state, {"moments": taken})
    assert copied["moments"] is taken and torch.equal(taken, state["moments"])
