"""Memory for copies is pinned beside training, and what is copied is one step's all the same.

A CPU pins nothing: plain memory that a test hands out stands for what is pinned.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.saves import advance, make_context, make_state
from tests.unit.train_fn.snapshots.test_whole import make_publisher
from train_fn.snapshots import whole as whole_module
from train_fn.snapshots.store import snapshot_store
from train_fn.state import tensor_tree

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
