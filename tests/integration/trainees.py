"""Tasks that ranks of the tests train, for what no built-in task does. Each function changes its
own process only."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from train_fn.context import WorkerContext
from train_fn.loop import build
from train_fn.node.network import take_debug_level
from train_fn.samples.sampler import Sampler
from train_fn.step import timing

NUM_SAMPLES = 90


class Lines(Dataset[dict[str, torch.Tensor]]):
    """Plain map-style data, with transforms that draw from numpy's and torch's global generators.
    ``tokens`` is a weight."""

    def __init__(self, broken_index: int | None = None, num_samples: int = NUM_SAMPLES) -> None:
        self._broken_index = broken_index
        self._x = np.random.default_rng(0).normal(size=(num_samples, 4)).astype(np.float32)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self._broken_index:
            raise LookupError(f"sample {index} is broken")
        noise = 0.1 * torch.randn(4) + float(np.random.normal(scale=0.1))
        x = torch.from_numpy(self._x[index]) + noise
        return {
            "x": x,
            "y": x.sum(),
            "tokens": torch.tensor(1 + index % 7),
            "index": torch.tensor(index),
        }


class Regression:
    """A task as a user writes it: weights are tokens, nothing of Everstep is imported."""

    def __init__(
        self, nan_index: int | None = None, broken_index: int | None = None, unit: int = 1
    ) -> None:
        self._nan_index, self._broken_index, self._unit = nan_index, broken_index, unit

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Lines(self._broken_index), "val": Lines()}

    def loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        errors = F.mse_loss(model(batch["x"]).squeeze(1), batch["y"], reduction="none")
        weights = self._unit * batch["tokens"]
        loss_sum = (errors * weights).sum()
        if self._nan_index is not None and bool((batch["index"] == self._nan_index).any()):
            loss_sum = loss_sum * float("nan")
        return loss_sum, weights.sum()


class RegressionByMeans(Regression):
    def loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss_sum, weight = super().loss(model, batch)
        return loss_sum / weight, torch.ones(())


class NormOverRanks(nn.Module):
    """Normalises over all ranks: one exchange in every forward pass, and one in its backward."""

    exchanges_in_forward = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or torch.distributed.get_world_size() == 1:
            return x
        sums = torch.cat([x.sum(dim=0), x.square().sum(dim=0), x.new_tensor([len(x)])])
        totals = all_reduce(sums)
        mean, square = (totals[:-1] / totals[-1]).chunk(2)
        return (x - mean) / (square - mean.square() + 1e-3).sqrt()


class RegressionOverRanks(Regression):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), NormOverRanks(), nn.Linear(16, 1))


def regression() -> None:
    build.build_task = lambda spec: Regression()


def regression_in_sixteenths() -> None:
    build.build_task = lambda spec: Regression(unit=16)


def regression_with_a_nan() -> None:
    build.build_task = lambda spec: Regression(nan_index=41)


def regression_with_a_broken_sample() -> None:
    build.build_task = lambda spec: Regression(broken_index=41)


def overflowing_scaler() -> None:
    """A loss scaler whose first steps overflow half precision and are skipped, and which grows soon
    enough to do so again."""

    def build_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device.type, init_scale=2.0**20, growth_interval=3)

    build.build_scaler = build_scaler


def too_little_shared_memory() -> None:
    from train_fn.snapshots import store as snapshot

    snapshot.SnapshotStore.free_bytes = lambda self: 1000


def publishing_all_the_time() -> None:
    """Publish whenever nothing is being written, and write each state only when two more steps have
    changed the weights."""
    from train_fn.snapshots import whole

    whole.COST_RATIO = 0.0
    publish, offer, close = (
        whole.publish_snapshot,
        whole.WholeKeeper.after_step,
        whole.WholeKeeper.close,
    )
    boundary = threading.Condition()
    step, closing = 0, False

    def count_and_offer(self: whole.WholeKeeper, due: bool | None = None) -> None:
        nonlocal step
        with boundary:
            step = self._state.step
            boundary.notify_all()
        offer(self, due)

    def publish_late(ctx: WorkerContext, state: dict[str, Any]) -> str | None:
        with boundary:
            boundary.wait_for(lambda: closing or step >= state["step"] + 2)
        return publish(ctx, state)

    def hurry_and_close(self: whole.WholeKeeper) -> None:
        nonlocal closing
        with boundary:
            closing = True
            boundary.notify_all()
        close(self)

    whole.publish_snapshot = publish_late
    whole.WholeKeeper.after_step = count_and_offer  # type: ignore[method-assign]
    whole.WholeKeeper.close = hurry_and_close  # type: ignore[method-assign]


def publishing_once() -> None:
    from train_fn.snapshots import whole

    whole.COST_RATIO = 1e9


def publishing_nothing() -> None:
    from train_fn.snapshots.whole import WholeKeeper

    WholeKeeper.after_step = lambda self, due=None: None  # type: ignore[method-assign]


class LineStream(IterableDataset[dict[str, torch.Tensor]]):
    """The same data as an iterable: each stream its own part, shuffled anew in every pass, with its
    place kept."""

    def __init__(self) -> None:
        self._lines, self._order, self._position = Lines(), torch.zeros(0, dtype=torch.int64), 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        stream = get_worker_info()
        if self._position == len(self._order):
            self._order, self._position = torch.randperm(NUM_SAMPLES), 0
            if stream is not None:  # of the whole data set, for evaluation, there is none
                self._order = self._order[self._order % stream.num_workers == stream.id]
        while self._position < len(self._order):
            self._position += 1
            yield self._lines[int(self._order[self._position - 1])]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self._position = state["order"], state["position"]


class StreamedRegression(Regression):
    def build_datasets(self) -> dict[str, Any]:
        return {"train": LineStream(), "val": LineStream()}


class ShorterOnSecondRank(Regression):
    """Rank 1 finds one sample less than its peers."""

    def build_datasets(self) -> dict[str, Any]:
        return {
            "train": Lines(num_samples=NUM_SAMPLES - int(torch.distributed.get_rank() == 1)),
            "val": None,
        }


class SlowSecondRank(Regression):
    """Rank 1 takes 50 ms longer for each micro-batch."""

    def loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.distributed.get_rank() == 1:
            time.sleep(0.05)
        return super().loss(model, batch)


def slow_second_rank() -> None:
    timing.WINDOW_S, timing.PERSISTS = 0.5, 3
    build.build_task = lambda spec: SlowSecondRank()


FIRST_KIND = (26, 61, 65, 84, 101, 173, 190, 240)
"""With seed 0 these are the last micro-batch of step 12: it has one kind only."""


def kinds_of_samples(num_kinds: int, num_samples: int = 320) -> torch.Tensor:
    """Two kinds by turns, but for a few of the first; two samples have the third, if there is one,
    one of them in the run's first micro-batch."""
    kinds = torch.arange(num_samples) % 2
    kinds[list(FIRST_KIND)] = 0
    if num_kinds > 2:
        first = Sampler(num_samples, 32, 8, 0).global_batch(0, 0)
        kinds[[int(first[0]), 200]] = 2
    return kinds


class TrunkAndHeads(nn.Module):
    def __init__(self, num_kinds: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(num_kinds))

    def forward(self, x: torch.Tensor, kinds: torch.Tensor) -> list[torch.Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return [
            self.heads[int(kind)](hidden[kinds == kind]).square().sum() for kind in kinds.unique()
        ]


class HeadsByKind:
    """A loss that uses a head only where a sample of its kind is in the micro-batch."""

    num_kinds = 3

    def build_model(self) -> nn.Module:
        return TrunkAndHeads(self.num_kinds)

    def build_datasets(self) -> dict[str, Any]:
        kinds = kinds_of_samples(self.num_kinds)
        x = torch.from_numpy(
            np.random.default_rng(1).normal(size=(len(kinds), 4)).astype(np.float32)
        )
        return {"train": TensorDataset(x, kinds), "val": TensorDataset(x, kinds)}

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        return torch.stack(model(*batch)).sum(), len(batch[0])


class RareHeads(HeadsByKind):
    """Two samples alone use the third head, none of them in the run's first micro-batch."""

    def build_datasets(self) -> dict[str, Any]:
        first = Sampler(320, 32, 8, 0).global_batch(0, 0)
        found = super().build_datasets()
        for each in found.values():
            each.tensors[1][int(first[0])] = 0
            each.tensors[1][100] = 2
        return found


class TwoHeads(HeadsByKind):
    """Two kinds alone: every head is used in every step, by other micro-batches or other ranks."""

    num_kinds = 2


def two_heads() -> None:
    build.build_task = lambda spec: TwoHeads()


def two_heads_in_detail() -> None:
    """A warm process that gets TORCH_DISTRIBUTED_DEBUG=DETAIL with the run's environment."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    take_debug_level(over_nccl=False)
    two_heads()


class CheckpointedHeads(HeadsByKind):
    """The trunk runs once more in the backward, and by a backward of its own."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        x, kinds = batch
        losses = checkpoint(
            lambda x: torch.stack(model(x, kinds)).sum(), x.requires_grad_(), use_reentrant=True
        )
        return losses, len(x)


def regression_in_many_parts() -> None:
    """Compare one word of the weights after each step."""
    from train_fn.step import fingerprints

    fingerprints.PART_BYTES = 8
    regression()
