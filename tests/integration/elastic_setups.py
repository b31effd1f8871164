"""Ways of exchange, tasks, deaths and kernels for tests of ``train.exactness: elastic``. Each
function changes its own process only."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from tests.integration import moving_buffers, trainees
from tests.integration.model_kinds import clip_task
from train_fn.elastic import exchange
from train_fn.elastic.message import CollectiveSlices, MessageSlices
from train_fn.loop import build, first_pass
from train_fn.samples import shares
from train_fn.state.sound_state import Numerics

KILLED_RANK, KILLED_STEP = 1, 3


def by_slices() -> None:
    """Treat every model as a large one, of many buckets."""
    exchange.SMALL_BYTES = 0
    exchange.BUCKET_BYTES = 4096


def killed_between_slices() -> None:
    """As ``by_slices``. Rank 1 ends itself with SIGKILL in the exchange of its fourth step: its
    header and its nodes are sent, its part of the result is not."""
    by_slices()
    exchange.sliced = DyingSlices


class DyingSlices(MessageSlices):
    """Slices of a rank that dies before it sends its part of the result."""

    _steps = 0

    def complete(self) -> None:
        self._steps += 1
        is_last = self._number == 1 and self._steps > KILLED_STEP
        if is_last and dist.get_rank() == KILLED_RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        super().complete()


def by_collectives() -> None:
    """As over NCCL: no messages between two ranks."""
    by_slices()
    exchange.sliced = lambda bucket, peers, number: CollectiveSlices(bucket, peers)


class Spread:
    """A metric as torchmetrics has them, whose state is a sum in float32: its bits depend on the
    order in which it is updated and merged."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.update_count = torch.zeros(()), 0

    def update(self, errors: torch.Tensor) -> None:
        self.total, self.update_count = self.total + errors.abs().sum(), self.update_count + 1

    def merge_state(self, other: Spread) -> None:
        self.total = self.total + other.total

    def compute(self) -> torch.Tensor:
        return self.total

    def to(self, device: torch.device) -> Spread:
        return self

    def cpu(self) -> Spread:
        return self


class MeasuredTask(moving_buffers.MovingTask):
    """A user's task: all kinds of state that forward passes change, and a metric of its own over
    validation data of several micro-batches."""

    def build_datasets(self) -> dict[str, Any]:
        rows = trainees.Lines(num_samples=900)
        return super().build_datasets() | {"val": rows}

    def build_metrics(self) -> dict[str, Any]:
        return {"spread": Spread()}

    def metrics(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"spread": (model(batch["x"]) - batch["y"],)}


def measured_task() -> None:
    by_slices()
    build.build_task = lambda spec: MeasuredTask()


class SlowMeasuredTask(MeasuredTask):
    """Rank 1 takes 0.3 s more for a micro-batch than others, however busy the machine is."""

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        if dist.get_world_size() > 1:
            time.sleep(0.3 if dist.get_rank() == 1 else 0.0)
        return super().loss(model, batch)


def slow_second_rank() -> None:
    """As ``measured_task``; and shares by speed are planned after a few steps."""
    by_slices()
    shares.MIN_STEPS, shares.WINDOW_S = shares.PARTS, 0.1
    build.build_task = lambda spec: SlowMeasuredTask()


class Texts(Dataset[torch.Tensor]):
    """Sequences of 2 to 40 tokens."""

    def __init__(self, num_samples: int) -> None:
        self.lengths = np.random.default_rng(num_samples).integers(2, 41, num_samples)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(index, index + int(self.lengths[index])) % 11 + 1


class PaddedTexts:
    """A task of texts, whose loss is a sum over tokens that are no padding."""

    def build_model(self) -> torch.nn.Module:
        layers = torch.nn.Embedding(12, 8, padding_idx=0), torch.nn.Dropout(0.1)
        return torch.nn.Sequential(*layers, torch.nn.Linear(8, 12))

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Texts(160), "val": Texts(30)}

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(samples, batch_first=True)

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        found, wanted = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        loss_sum = cross_entropy(found, wanted, ignore_index=0, reduction="sum")
        return loss_sum, int((wanted != 0).sum())


def exchanging_model() -> None:
    clip_task()


def other_kernels_on_second_rank() -> None:
    """Rank 1's kernels compute other gradients."""
    trainees.regression()
    numerics_of = first_pass.numerics_of

    def numerics_of_rank(*args: Any) -> Numerics:
        found = numerics_of(*args)
        if dist.get_rank() == 1:
            kernels = found.kernels.replace(" threads", "00 threads")
            return replace(found, gradients="other", kernels=kernels)
        return found

    first_pass.numerics_of = numerics_of_rank


def other_kernels() -> None:
    """All ranks' kernels compute another loss, as after a move to other machines."""
    trainees.regression()
    numerics_of = first_pass.numerics_of

    def numerics_there(*args: Any) -> Numerics:
        found = numerics_of(*args)
        return replace(found, loss="0x1p+0")

    first_pass.numerics_of = numerics_there
