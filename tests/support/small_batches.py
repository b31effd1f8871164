"""Tasks with micro-batches of a single sample, and of none: refused, or left out."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

SHAPES = {"flat": (4,), "image": (2, 3, 3), "pooled": (2, 1, 1)}


class Normed:
    """A BatchNorm over ``shape``; samples of training are ``length``."""

    def __init__(self, length: int, shape: str = "flat", *, frozen: bool = False) -> None:
        self.length, self.shape, self.frozen = length, SHAPES[shape], frozen

    def build_model(self) -> nn.Module:
        norm = nn.BatchNorm1d(4) if len(self.shape) == 1 else nn.BatchNorm2d(2)
        if self.frozen:
            norm.eval()
        return nn.Sequential(norm, nn.Flatten(), nn.Linear(math.prod(self.shape), 1))

    def build_datasets(self) -> dict[str, Any]:
        x = torch.randn(self.length, *self.shape)
        return {"train": TensorDataset(x, x.flatten(1).sum(1)), "val": None}

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        x, y = batch
        return F.mse_loss(model(x)[:, 0], y, reduction="sum"), len(y)


class Spoilt:
    """A mean of numbers, of which those below 0 are bad; ``collate`` leaves them out, and gives
    None where nothing is left. ``held_out`` are those of the validation set, if it is another."""

    def __init__(self, values: list[float], held_out: list[float] | None = None) -> None:
        self.values, self.held_out = values, values if held_out is None else held_out

    def build_model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def build_datasets(self) -> dict[str, Any]:
        return {"train": self.values, "val": self.held_out}

    def collate(self, samples: list[float]) -> torch.Tensor | None:
        good = [sample for sample in samples if sample >= 0]
        return torch.tensor(good) if good else None

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (model(torch.ones(1)) - batch).square().sum(), len(batch)

    def metrics(self, model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        return {"mean": (batch.sum(), len(batch))}
