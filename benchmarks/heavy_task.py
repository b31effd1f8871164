"""A task whose state has a chosen size. Most of its model is frozen, so that a step is as short
with a large state as with a small one, or all of it is trained.

It imports nothing of this package, so that it can be uploaded by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

BLOCK = 4 << 20
"""Elements of one weight."""


class Body(nn.Module):
    """Weights of a given size. The forward pass reads them if they are trained."""

    def __init__(self, num_bytes: int, trained: bool, init: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        left, weights = num_bytes // 4, []
        while left > 0:
            weights.append(nn.Parameter(init(min(left, BLOCK)), trained))
            left -= BLOCK
        self.weights, self.head, self.is_trained = (
            nn.ParameterList(weights),
            nn.Linear(4, 1),
            trained,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        return out + sum(weight.mean() for weight in self.weights) if self.is_trained else out


class HeavyTask:
    """Train a ``Body``. With AdamW a third of the state are weights if all of it is trained."""

    num_samples = 1280

    def __init__(self, megabytes: int, trained: bool = False) -> None:
        self._bytes = megabytes * 10**6 // (3 if trained else 1)
        self._trained = trained

    def _init(self, num_elements: int) -> torch.Tensor:
        return torch.full((num_elements,), 0.01)

    def build_model(self) -> nn.Module:
        return Body(self._bytes, self._trained, self._init)

    def build_datasets(self) -> dict[str, Any]:
        return {"train": TensorDataset(torch.ones(self.num_samples, 4)), "val": None}

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return model(batch[0]).square().sum(), len(batch[0])
