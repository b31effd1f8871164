"""A frozen base with a small adapter beside it, as LoRA has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.integration.trainees import Lines, Regression


class Adapted(nn.Module):
    def __init__(self, base_seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(base_seed)
        self.base = nn.Linear(4, 64).requires_grad_(False)
        self.tied = self.base
        with torch.no_grad():
            self.base.weight.copy_(torch.randn(64, 4, generator=generator))
        self.norm = nn.BatchNorm1d(64)
        self.adapter = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 64))
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.base(x) + self.adapter(x)))
        return found


class LoRA(Regression):
    def __init__(self, base_seed: int = 0) -> None:
        super().__init__()
        self._base_seed = base_seed

    def build_model(self) -> nn.Module:
        return Adapted(self._base_seed)

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Lines(), "val": Lines()}
