"""A task as a user writes it, whose every step plain torch can repeat: a straight line, fitted to
all samples at once.

Uploaded as a module of its own, so it imports nothing of these tests.
"""

from typing import Any

import torch
from torch import nn

NUM_SAMPLES, LR = 32, 0.05
X = torch.linspace(-1, 1, NUM_SAMPLES)
Y = 3 * X + 1


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    in_memory = True

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return X[index], Y[index]


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope, self.offset = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.slope * x + self.offset


class StraightLine:
    """``broken`` names the method that raises once the line has risen above ``limit``."""

    def __init__(self, broken: str = "", limit: float = 0.0) -> None:
        self.broken, self.limit = broken, limit

    def build_model(self) -> nn.Module:
        return Line()

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Points(), "val": Points()}

    def loss(self, model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        self.check("loss", model)
        x, y = batch
        return (model(x) - y).square().sum(), len(x)

    def metrics(self, model: Any, batch: Any) -> dict[str, tuple[torch.Tensor, int]]:
        self.check("metrics", model)
        x, y = batch
        return {"error": ((model(x) - y).abs().sum(), len(x))}

    def check(self, method: str, model: Any) -> None:
        if method == self.broken and float(model.offset.detach()) > self.limit:
            raise LookupError(f"{method} is broken")


def by_plain_torch(steps: int) -> tuple[float, float]:
    """Slope and offset after so many steps."""
    line = Line()
    optimizer = torch.optim.SGD(line.parameters(), lr=LR)
    for _ in range(steps):
        optimizer.zero_grad()
        (line(X) - Y).square().mean().backward()
        optimizer.step()
    return float(line.slope.detach()), float(line.offset.detach())
