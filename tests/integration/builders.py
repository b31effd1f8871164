"""Tasks that draw while they build data and weights, for ranks whose generators and sets begin
differently, as on several nodes."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from tests.integration.trainees import NUM_SAMPLES, Lines, Regression
from train_fn.loop import build


def rank() -> int:
    return torch.distributed.get_rank()


def begin_with(task: type[Regression]) -> None:
    """Ranks of the tests are forked from one process: give each generators that begin elsewhere, as
    processes of their own have."""
    random.seed(os.urandom(8))
    np.random.seed()
    torch.seed()
    build.build_task = lambda spec: task()


class OwnSplit(Regression):
    """Divides its samples by a draw from each global generator; measures how many validation
    samples some rank trains on."""

    def build_datasets(self) -> dict[str, Any]:
        order = np.random.permutation(NUM_SAMPLES)[torch.randperm(NUM_SAMPLES).numpy()].tolist()
        random.shuffle(order)
        ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, order[:60])
        self.trained_on = torch.tensor(sorted({index for indices in ranks for index in indices}))
        return {"train": Subset(Lines(), order[:60]), "val": Subset(Lines(), order[60:])}

    def metrics(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"leaked": (torch.isin(batch["index"], self.trained_on).sum(), len(batch["index"]))}


class GreedyData(OwnSplit):
    """Draws more on rank 1 while it builds its data than on rank 0."""

    def build_datasets(self) -> dict[str, Any]:
        found = super().build_datasets()
        torch.randn(rank() + 1)
        return found


class SplitByOwnGenerator(Regression):
    def build_datasets(self) -> dict[str, Any]:
        order = np.random.default_rng(100 + rank()).permutation(NUM_SAMPLES).tolist()
        return {"train": Subset(Lines(), order[:60]), "val": None}


class OtherLabel(Dataset[Any]):
    def __init__(self, at: int) -> None:
        self._at = at

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return Lines()[index] | {"tokens": 1 + int(index == self._at and rank() == 1)}


class OtherValidation(Regression):
    """One validation sample has another label on rank 1."""

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Lines(), "val": OtherLabel(3)}


class NoisyLines(Lines):
    """Augments by a generator of its own, which moves on from sample to sample."""

    noise = np.random.default_rng()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        found = super().__getitem__(index)
        return found | {"x": found["x"] + float(self.noise.normal())}


class OwnNoise(Regression):
    def build_datasets(self) -> dict[str, Any]:
        NoisyLines.noise = np.random.default_rng(rank())
        return {"train": NoisyLines(), "val": None}


class OtherWeights(Regression):
    """Draws its last bias from a generator of its own."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        assert isinstance(model, nn.Sequential)
        nn.init.constant_(model[3].bias, 0.1 * rank())  # type: ignore[arg-type]
        return model


class OtherTable(Regression):
    """Keeps a table that no state holds."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("table", torch.full((3,), float(rank())), persistent=False)
        return model


def own_split() -> None:
    begin_with(OwnSplit)


def greedy_data() -> None:
    begin_with(GreedyData)


def split_by_own_generator() -> None:
    begin_with(SplitByOwnGenerator)


def other_validation() -> None:
    begin_with(OtherValidation)


def own_noise() -> None:
    begin_with(OwnNoise)


def other_weights() -> None:
    begin_with(OtherWeights)


def other_table() -> None:
    begin_with(OtherTable)
