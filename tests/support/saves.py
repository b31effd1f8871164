"""A rank alone that saves a small state, and a storage whose saves a test holds back."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.spec.run_spec import RunSpec
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.one_rank import one_rank
from tests.support.raw_specs import TASK
from train_fn.checkpoints.save_slot import BoundaryCopies, BoundaryCopy
from train_fn.checkpoints.saver import Saver
from train_fn.context import WorkerContext
from train_fn.state.train_state import TrainState


def make_context(
    tmp_path: Path, rank: int = 0, uri: str | None = None, **checkpoint: Any
) -> WorkerContext:
    spec = RunSpec.model_validate(
        {
            "name": "saver",
            "task": TASK,
            "checkpoint": {"every_steps": 10, "keep_latest": 2, **checkpoint},
        }
    )
    return one_rank(spec, RunDir(open_storage(uri or str(tmp_path)), "run_saver"), rank=rank)


def make_state(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps_per_epoch: int = 100,
) -> TrainState:
    """The state of a small model; by default of 2 times 2 weights, under AdamW."""
    model = nn.Linear(2, 2) if model is None else model
    return TrainState(
        model,
        optimizer or torch.optim.AdamW(model.parameters()),
        torch.amp.GradScaler("cpu", enabled=False),
        None,
        steps_per_epoch=steps_per_epoch,
        fingerprint="data",
    )


def advance(state: TrainState, step: int) -> None:
    state.step = step
    with torch.no_grad():
        state.model.weight.fill_(step)  # type: ignore[union-attr]


def weight_in(ctx: WorkerContext, name: str) -> float:
    model = torch.load(io.BytesIO(ctx.checkpoints.read_file(name, "model.pt")), weights_only=True)
    return float(model["weight"][0, 0])


class SlowStorage:
    """Holds every checkpoint until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)
        begin = CheckpointStore.begin

        def begin_slowly(store: CheckpointStore, step: int, submission: int, attempt: int) -> Any:
            self.begun.release()
            assert self.go.acquire(timeout=60)
            return begin(store, step, submission, attempt)

        monkeypatch.setattr(CheckpointStore, "begin", begin_slowly)


def train_step(saver: Saver, state: TrainState, step: int, is_best: bool = False) -> bool:
    """One step as the loop takes it; whether its state was due to be saved."""
    state.step = step - 1
    due = saver.is_due()
    advance(state, step)
    saver.save_if_due(due=due, is_best=is_best)
    return due


class CountedCopies(BoundaryCopies):
    """Notes where each copy lies, and how many are held at a time."""

    def __init__(self, state: TrainState) -> None:
        super().__init__(state)
        self.places: set[int] = set()
        self.held = self.most_held = 0

    def take(self) -> BoundaryCopy:
        copy = super().take()
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        self.places.add(next(iter(copy.state["model"].values())).data_ptr())
        return copy

    def release(self, copy: BoundaryCopy) -> None:
        self.held -= 1
        super().release(copy)
