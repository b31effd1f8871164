"""Layers without a shape: a pass over one batch gives it to them, and leaves nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from train_fn.errors import BadTask
from train_fn.loop.build import lazy_names, shape_lazy_tensors


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.lazy_norm = (
            nn.LazyLinear(4),
            nn.BatchNorm1d(4),
            nn.LazyBatchNorm1d(),
        )
        self.unused, self.calls = nn.LazyLinear(2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.lazy_norm(self.norm(self.first(x)))
        return found


class Task:
    def build_model(self) -> Any:
        return Model()

    def loss(self, model: Any, batch: torch.Tensor, step: int) -> Any:
        assert step == 0
        return model(batch).sum(), len(batch)


def test_the_pass_gives_shapes_and_is_otherwise_undone() -> None:
    model, task = Model(), Task()
    del model.unused
    assert lazy_names(model)[:2] == ["first.weight", "first.bias"]
    shape_lazy_tensors(task, model, torch.randn(6, 3))  # type: ignore[arg-type]
    assert lazy_names(model) == [] and model.first.weight.shape == (4, 3)
    for norm in (model.norm, model.lazy_norm):
        assert norm.num_batches_tracked == 0 and torch.equal(norm.running_mean, torch.zeros(4))
    assert model.calls == 0 and model.training


def test_what_the_first_micro_batch_does_not_use_is_refused_by_name() -> None:
    with pytest.raises(BadTask) as raised:
        shape_lazy_tensors(Task(), Model(), torch.randn(6, 3))  # type: ignore[arg-type]
    message = str(raised.value)
    assert message.startswith("Task.build_model (") and message.endswith("that uses all of it")
    assert "gives them none: unused.weight, unused.bias" in message
