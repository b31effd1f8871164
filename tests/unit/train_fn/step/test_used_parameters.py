"""Parameters that no micro-batch of a step used: which they are, and what a run of one rank makes
of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.trainees import Regression
from tests.support.own_task_runs import TaskRuns, refusal
from train_fn.loop.attempt import train
from train_fn.step.peers import Peers, UsedParameters


def test_only_a_gradient_that_is_there_counts() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, parameter: torch.Tensor) -> torch.Tensor:
            return parameter.new_zeros(())

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> None:
            return None

    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    used = UsedParameters(parameters, Peers(0, 1, torch.device("cpu")))
    loss = parameters[0].sum() + 0 * parameters[1].sum() + Nothing.apply(parameters[2])  # type: ignore[no-untyped-call]
    loss.backward()
    assert len(used) == 2
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    used.drop_unused()
    assert [parameter.grad is None for parameter in parameters] == [False, False, True, True]
    assert len(used) == 0


@pytest.mark.own_process
def test_a_late_first_gradient_is_no_fault_and_a_loss_without_the_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's fused SGD with momentum raises where some parameters have a momentum and others begin
    theirs."""

    class Late(Regression):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            model.late = nn.Linear(1, 1)
            return model

        def loss(self, model: Any, batch: Any, step: int) -> Any:  # type: ignore[override]
            loss_sum, weight = super().loss(model[:4], batch)
            late = model.late(loss_sum.detach().reshape(1, 1)).sum() if step >= 2 else 0.0
            return loss_sum + late, weight

    runs, sgd = TaskRuns(tmp_path, monkeypatch), {"name": "sgd", "lr": 0.01, "momentum": 0.9}
    spec = {"unused_parameters": "allow", "max_steps": 4}
    assert train(runs.begin(Late(), train=spec, optimizer=sgd)) is None

    class Apart(Regression):
        def loss(self, model: Any, batch: Any) -> Any:
            return nn.Linear(4, 1)(batch["x"]).sum(), 1

    message = refusal(runs.begin(Apart(), train=spec))
    assert message.startswith("the loss moves no parameter: Apart.loss (")
    assert message.endswith("does not use the model that it was given")
