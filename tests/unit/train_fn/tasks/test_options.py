"""What a task asks for beside its methods: no loss in validation, and a step's number in
``loss``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.wire.events import EventKind
from tests.integration.trainees import Regression
from tests.support.one_rank import journal_of
from tests.support.own_task_runs import TaskRuns, refusal
from train_fn.loop.attempt import train
from train_fn.recovery.evidence import StepFailed
from train_fn.tasks.protocol import loss_arguments

pytestmark = pytest.mark.own_process

STEPS_PER_EPOCH = 12
"""Of 90 samples in global batches of 8."""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskRuns:
    return TaskRuns(tmp_path, monkeypatch)


class Detection(Regression):
    """Has a loss in train mode only, as torchvision's detection models have."""

    validation_loss: Any = False

    def loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not model.training:
            raise AttributeError("'list' object has no attribute 'values'")
        return super().loss(model, batch)

    def metrics(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"found": ((model(batch["x"]) > 0).sum(), len(batch["x"]))}


def test_a_task_without_a_loss_in_validation_is_measured_by_its_metrics(runs: TaskRuns) -> None:
    checkpoint = {"best_metric": "found", "every_steps": None}
    ctx = runs.begin(Detection(), train={"epochs": 2, "ema_decay": 0.9}, checkpoint=checkpoint)
    assert train(ctx) is None
    evaluated = journal_of(ctx).of_kind(EventKind.EVALUATED)
    assert [set(each["metrics"]) for each in evaluated] == [{"val_found", "ema_val_found"}] * 2
    best = max(evaluated, key=lambda each: float(each["metrics"]["val_found"]))
    assert best["step"] in [manifest.step for manifest in ctx.checkpoints.list()]


def test_the_best_by_a_loss_that_is_not_measured_is_refused_before_a_step(runs: TaskRuns) -> None:
    for metric in ("loss", "val_loss", "ema_val_loss"):
        train_spec = {"ema_decay": 0.9} if metric.startswith("ema") else {}
        ctx = runs.begin(Detection(), checkpoint={"best_metric": metric}, train=train_spec)
        message = refusal(ctx)
        assert message.startswith(f"checkpoint.best_metric is {metric!r}, but Detection sets")
        assert "Detection.metrics (" in message and "or to null" in message
        assert journal_of(ctx).points == []


def test_metrics_may_return_a_loss_of_their_own(runs: TaskRuns) -> None:
    class Measured(Detection):
        def metrics(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
            return {"loss": (3.0, 2)}

    ctx = runs.begin(Measured(), train={"max_steps": 1})
    assert train(ctx) is None
    [evaluated] = journal_of(ctx).of_kind(EventKind.EVALUATED)
    assert evaluated["metrics"] == {"val_loss": 1.5}


def test_nothing_that_is_measured_and_no_yes_or_no_are_refused(runs: TaskRuns) -> None:
    class Silent(Regression):
        validation_loss = False

    assert refusal(runs.begin(Silent())) == (
        "Silent sets validation_loss to False and has no method metrics, so that nothing is "
        "measured. Add metrics(model, batch), or let build_datasets return no val"
    )
    task = Detection()
    task.validation_loss = "none"
    message = "validation_loss of Detection is 'none'; set it to True or False"
    assert refusal(runs.begin(task)) == message


def test_a_loss_that_fails_in_eval_mode_names_the_way_out(
    runs: TaskRuns, caplog: pytest.LogCaptureFixture
) -> None:
    task = Detection()
    task.validation_loss = True
    with pytest.raises(StepFailed, match="no attribute 'values'"), caplog.at_level(logging.WARNING):
        train(runs.begin(task))
    assert "failed in eval mode" in caplog.text and "validation_loss = False" in caplog.text

    class Found(Regression):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            return super().loss(model, batch) if model.training else [{"boxes": 1}]

    message = refusal(runs.begin(Found()))
    assert message.startswith("Found.loss (") and "called to evaluate the model" in message
    assert "not [{'boxes': 1}]. If the model has no loss in eval mode" in message


# ---------------------------------------------------------------- step and epoch


class Told(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[bool, int, int]] = []

    def loss(  # type: ignore[override]
        self, model: nn.Module, batch: dict[str, torch.Tensor], *, epoch: int, step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.told.append((model.training, step, epoch))
        return super().loss(model, batch)


def test_loss_is_given_the_step_and_the_epoch_that_it_asks_for(runs: TaskRuns) -> None:
    task = Told()
    train_spec = {"epochs": 3, "max_steps": 30}
    ctx = runs.begin(task, train=train_spec)
    assert train(ctx) is None
    last = [(step, step // STEPS_PER_EPOCH) for step in range(30)]
    assert [told[1:] for told in task.told if told[0]] == last
    # In an evaluation: steps done, and the epoch that has just ended.
    measured = [told[1:] for told in task.told if not told[0]]
    assert list(dict.fromkeys(measured)) == [(12, 0), (24, 1), (30, 2)]


def test_a_loss_is_given_nothing_that_it_has_no_parameter_for() -> None:
    class Tasks:
        def plain(self, model: Any, batch: Any) -> None: ...
        def both(self, model: Any, batch: Any, step: int, epoch: int = 0) -> None: ...
        def one(self, model: Any, batch: Any, *rest: Any, epoch: int, **more: Any) -> None: ...
        def other(self, step: Any, epoch: Any) -> None: ...
        def positional(self, model: Any, batch: Any, step: int = 0, /) -> None: ...

    found = {}
    for name in ("plain", "both", "one", "other", "positional"):
        task: Any = Tasks()
        task.loss = getattr(task, name)
        found[name] = loss_arguments(task)
    assert found == {
        "plain": (),
        "both": ("step", "epoch"),
        "one": ("epoch",),
        "other": (),
        "positional": (),
    }
    task.loss = torch.add
    assert loss_arguments(task) == ()


class Forces(Regression):
    """Differentiates the model's output by its input, in validation, too."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        x = batch["x"].detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum(), len(x)


def test_a_loss_that_differentiates_is_told_of_enable_grad_at_every_attempt(
    runs: TaskRuns,
) -> None:
    first = runs.begin(Forces())
    for ctx in (first, runs.begin(Forces(), after=first)):
        message = refusal(ctx)
        assert "Forces.loss (" in message and "`with torch.enable_grad():`" in message
        assert journal_of(ctx).points == []


class OwnRate(torch.optim.Optimizer):
    """Computes its learning rate from the step, as Adafactor does with relative_step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": None})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            parameter.data.sub_(parameter.grad, alpha=0.01 / state["step"])


class Adapts(Regression):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return OwnRate(model.parameters())


def test_an_optimizer_that_computes_its_own_rate_trains_and_no_schedule_scales_it(
    runs: TaskRuns,
) -> None:
    ctx = runs.begin(Adapts(), train={"max_steps": 4})
    assert train(ctx) is None
    assert [point["values"]["lr"] for point in journal_of(ctx).points] == [None] * 4
    again = runs.begin(Adapts(), after=ctx, train={"max_steps": 6})
    assert train(again) is None
    [restored] = journal_of(again).of_kind(EventKind.RESTORED)
    assert (restored["step"], journal_of(again).points[-1]["step"]) == (4, 6)
    message = refusal(runs.begin(Adapts(), name="run_b", schedule={"name": "cosine"}))
    assert "has no learning rate (lr=None)" in message and "Remove schedule" in message
