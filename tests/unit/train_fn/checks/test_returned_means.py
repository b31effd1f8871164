"""A loss must return a sum: one that returns a mean is refused, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from train_fn.checks.returns import check_sum
from train_fn.errors import BadTask


class Losses:
    """Tasks of which only the loss is looked at."""

    def __init__(self, loss: Callable[[nn.Module, Any], Any]) -> None:
        self._loss = loss

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self._loss(model, batch)


def errors(model: nn.Module, batch: Any) -> torch.Tensor:
    values: torch.Tensor = (model(batch["x"]) - batch["y"]).square().sum(1)
    return values


@pytest.mark.parametrize(
    ("loss", "is_mean"),
    [
        (lambda model, batch: (errors(model, batch).sum(), len(batch["y"])), False),
        (lambda model, batch: (errors(model, batch).mean(), len(batch["y"])), True),
        (lambda model, batch: (errors(model, batch).mean(), 7 * len(batch["y"])), True),
        (lambda model, batch: (errors(model, batch).mean(), 1), False),
        (lambda model, batch: (errors(model, batch).logsumexp(0), len(batch["y"])), False),
        (lambda model, batch: (0 * errors(model, batch).sum(), len(batch["y"])), False),
    ],
)
def test_a_loss_that_returns_a_mean_is_refused_and_nothing_else_is(
    loss: Callable[[nn.Module, Any], Any], is_mean: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    batch = {"x": torch.randn(9, 3), "y": torch.randn(9, 1)}
    task = Losses(loss)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Any) -> Any:
            return task.loss(self.model, batch)

    with pytest.raises(BadTask, match="the mean of a batch") if is_mean else nullcontext():
        check_sum(task, Step(), batch, 9)  # type: ignore[arg-type]
    assert all(module.training for module in model.modules())
    check_sum(task, Step(), {**batch, "names": "a text"}, 9)  # type: ignore[arg-type]
