"""A task whose state has a chosen size and whose step is short: nearly all of it is frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

BLOCK = 4 << 20
"""Elements of one weight."""


class Heavy(nn.Module):
    """A linear layer beside frozen weights of ``megabytes``."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        num_blocks = megabytes * 10**6 // (4 * BLOCK)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.full((BLOCK,), 0.01), requires_grad=False) for _ in range(num_blocks)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        return out


class HeavyTask:
    """Classify noise."""

    def __init__(self, megabytes: int) -> None:
        self._megabytes = megabytes

    def build_model(self) -> nn.Module:
        return Heavy(self._megabytes)

    def build_datasets(self) -> dict[str, Any]:
        noise = torch.Generator().manual_seed(0)
        samples = torch.randn(1280, 64, generator=noise)
        labels = torch.randint(10, (1280,), generator=noise)
        return {"train": TensorDataset(samples, labels), "val": None}

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        loss_sum = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        return loss_sum, len(batch[1])
