"""Tasks whose evaluation is what a test is about. Each function changes its own process only."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn
from torch.utils.data import IterableDataset

from tests.integration.trainees import Lines, Regression, publishing_once
from train_fn.context import WorkerContext
from train_fn.loop import build, training
from train_fn.loop.evaluate import MIN_MICRO_BATCH
from train_fn.loop.replica import Replica
from train_fn.session import report
from train_fn.snapshots.whole import WholeKeeper

NUM_STREAMED = MIN_MICRO_BATCH + 16
NUM_HELD_OUT = 3 * MIN_MICRO_BATCH + 16


class UnevenMetrics(Regression):
    """Each validation batch has metrics of its own: ``part_N``, ``even`` and ``odd`` by its number,
    ``late`` in the last one."""

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Lines(), "val": Lines(num_samples=NUM_HELD_OUT)}

    def metrics(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        index = batch["index"]
        number = int(index.min()) // MIN_MICRO_BATCH
        share = index.sum(), len(index)
        late = share if number == 3 else None
        return {
            f"part_{number}": share,
            "even" if number % 2 == 0 else "odd": share,
            "late": late,
            "all": share,
        }


class CountingNorm(nn.Module):
    """Counts its calls in a buffer, in eval mode too, and puts another tensor there each time."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + (0 if self.training else 1)
        return x / self.count


class Rest(IterableDataset[dict[str, torch.Tensor]]):
    """Goes on where it was left, and begins anew after its end."""

    def __init__(self) -> None:
        self._lines, self._position = Lines(num_samples=NUM_STREAMED), 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self._position < NUM_STREAMED:
            self._position += 1
            yield self._lines[self._position - 1]
        self._position = 0


class Disturbing(Regression):
    """An evaluation that changes a buffer and what the task keeps, draws at random, and reads data
    that remembers its place."""

    calls = 0

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), CountingNorm(), nn.Linear(16, 1))

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Lines(), "val": Rest()}

    def loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if model.training:
            children = psutil.Process().children()
            assert len(children) <= 1, f"beside the loader of the training data: {children}"
        return super().loss(model, batch)

    def metrics(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.calls += 1
        drawn = random.random() + float(np.random.rand()) + torch.rand(()).item()
        return {
            "drawn": (drawn, 1),
            "calls": (self.calls, 1),
            "index": (batch["index"].sum(), len(batch["index"])),
        }


def disturbing() -> None:
    build.build_task = lambda spec: Disturbing()


def disturbing_without_a_try() -> None:
    def try_nothing(ctx: WorkerContext, built: Replica) -> None:
        pass

    disturbing()
    training.try_evaluation = try_nothing


class BrokenMetrics(Regression):
    def metrics(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        raise LookupError("metrics are broken")


class Deadly(UnevenMetrics):
    """Every rank ends by a signal in its first evaluation of trained weights, as where native code
    is broken."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        self._first = next(model.parameters()).detach().clone()
        return model

    def metrics(self, model: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        if self.moved(model):
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def moved(self, model: Any) -> bool:
        return not torch.equal(self._first, model[0].weight)


def deadly_metrics() -> None:
    """Only the first state is published by itself; what is kept before an evaluation is written
    before the ranks die."""
    publishing_once()
    keep = WholeKeeper.publish_now

    def keep_and_wait(self: WholeKeeper) -> None:
        keep(self)
        with self._lock:
            assert self._lock.wait_for(lambda: self._waiting is None and not self._writing, 60)

    WholeKeeper.publish_now = keep_and_wait  # type: ignore[method-assign]
    build.build_task = lambda spec: Deadly()


SECOND_RANK_S, HOOK_S = 0.3, 1000.0


class Shifted:
    """The module ``time`` as the reporter sees it."""

    shift_s = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return time.perf_counter() + cls.shift_s


class SlowHook(Regression):
    """By the reporter's clock its hook takes a quarter of an hour. Both ranks begin it together,
    however busy the machine is, and on rank 1 it takes a moment longer."""

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        Shifted.shift_s += HOOK_S
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 1:
            time.sleep(SECOND_RANK_S)


def slow_hook() -> None:
    report.time = Shifted  # type: ignore[assignment]
    build.build_task = lambda spec: SlowHook()
