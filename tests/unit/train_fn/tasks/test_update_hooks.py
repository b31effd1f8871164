"""``build_scheduler`` and ``after_step``: what they do, and what is refused with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.trainees import Regression
from tests.support.one_rank import journal_of
from tests.support.own_task_runs import TaskRuns, refusal
from train_fn.checkpoints.commit import load_checkpoint
from train_fn.loop import build as parts
from train_fn.loop.attempt import train

pytestmark = pytest.mark.own_process

PEAK = 0.25


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskRuns:
    return TaskRuns(tmp_path, monkeypatch)


class Scheduled(Regression):
    """Halves its rate after the third and the fifth step. Notes the rate that each step used."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[float] = []

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=PEAK)
        optimizer.register_step_pre_hook(
            lambda *_: self.used.append(optimizer.param_groups[0]["lr"])
        )
        return optimizer

    def build_scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
        self.total_steps = total_steps
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5], gamma=0.5)
        return self.scheduler


def test_a_scheduler_steps_once_a_step_and_goes_on_after_a_restart(runs: TaskRuns) -> None:
    rates = [PEAK, PEAK, PEAK, PEAK / 2, PEAK / 2, PEAK / 4, PEAK / 4]
    task = Scheduled()
    ctx = runs.begin(task, train={"max_steps": 4})
    assert train(ctx) is None
    assert task.used == [point["values"]["lr"] for point in journal_of(ctx).points] == rates[:4]
    [manifest] = ctx.checkpoints.list()
    assert load_checkpoint(ctx.run_dir, manifest)["scheduler"]["last_epoch"] == 4
    again = Scheduled()
    assert train(runs.begin(again, after=ctx, train={"max_steps": 7})) is None
    assert again.used == rates[4:] and again.total_steps == 7
    assert again.scheduler.last_epoch == 7 and again.scheduler.milestones.total() == 2


def test_the_spec_s_schedule_and_a_scheduler_are_refused_together(runs: TaskRuns) -> None:
    message = refusal(runs.begin(Scheduled(), schedule={"name": "cosine"}))
    assert message.startswith("the spec sets schedule (cosine), and Scheduled.build_scheduler (")
    assert message.endswith("Remove schedule from the spec, or build_scheduler from the task")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda optimizer: None, "returned None, which has no step, state_dict, load_state_dict"),
        (
            torch.optim.lr_scheduler.ReduceLROnPlateau,
            "a ReduceLROnPlateau, whose step needs arguments, for example a metric",
        ),
        (
            lambda _: torch.optim.lr_scheduler.ConstantLR(
                torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
            ),
            "returned a scheduler of another optimizer; make it for the one that it is given",
        ),
    ],
)
def test_what_is_no_scheduler_of_steps_is_refused(build: Any, words: str, runs: TaskRuns) -> None:
    class Wrong(Regression):
        def build_scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
            return build(optimizer)

    message = refusal(runs.begin(Wrong()))
    assert message.startswith("Wrong.build_scheduler (") and words in message


def test_a_rate_that_is_changed_past_the_scheduler_is_refused(runs: TaskRuns) -> None:
    class Meddling(Scheduled):
        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            optimizer = super().build_optimizer(model)
            optimizer.register_step_post_hook(
                lambda *_: optimizer.param_groups[0].update(lr=1.0 if len(self.used) > 2 else PEAK)
            )
            return optimizer

    message = refusal(runs.begin(Meddling()))
    assert "changed past the scheduler of build_scheduler: that of parameter group 0 is " in message
    assert message.endswith("and let the scheduler compute it")


# ---------------------------------------------------------------- after_step


class Averaged(Regression):
    """Holds its last bias at 0.5, and keeps what the hook saw."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.drawn: list[float] = []

    def build_model(self) -> Any:
        model: Any = super().build_model()
        self.first = model[3].bias.item()
        return model

    def after_step(self, model: Any, step: int) -> None:
        assert not torch.is_grad_enabled()
        model[3].bias.fill_(0.5)
        self.steps.append(step)
        self.drawn.append(float(torch.rand(())))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.drawn = state["steps"], state["drawn"]


def test_the_hook_comes_before_the_average_and_its_state_is_that_of_the_step(
    runs: TaskRuns,
) -> None:
    task = Averaged()
    ctx = runs.begin(task, train={"max_steps": 3, "ema_decay": 0.9})
    assert train(ctx) is None
    [manifest] = ctx.checkpoints.list()
    state = load_checkpoint(ctx.run_dir, manifest)
    assert state["task"]["steps"] == [0, 1, 2] and float(state["model"]["3.bias"]) == 0.5
    rest = (2 / 11) * (3 / 12) * (4 / 13)
    follows = 0.5 + rest * (task.first - 0.5)
    assert float(state["ema"]["3.bias"]) == pytest.approx(follows), "it follows what the hook left"
    again = Averaged()
    assert train(runs.begin(again, after=ctx, train={"max_steps": 4})) is None
    assert again.steps == [0, 1, 2, 3] and len(set(again.drawn)) == 4
    whole = Averaged()
    assert train(runs.begin(whole, name="run_whole", train={"max_steps": 4})) is None
    assert whole.drawn == again.drawn, "what it draws is a function of the step"


def test_a_step_that_fp16_leaves_out_has_no_hook(
    runs: TaskRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device.type, init_scale=2.0**20, growth_interval=1000)

    monkeypatch.setattr(parts, "build_scaler", build_scaler)
    task = Averaged()
    ctx = runs.begin(task, train={"precision": "fp16", "max_steps": 20})
    assert train(ctx) is None
    skipped = [int(point["values"]["skipped_steps"]) for point in journal_of(ctx).points]
    counts = zip([0, *skipped], skipped, strict=False)
    taken = [step for step, (before, after) in enumerate(counts) if before == after]
    assert task.steps == taken and 0 < skipped[-1] < 20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model[0].requires_grad_(False), "requires_grad of 0.weight, 0.bias became"),
        (
            lambda model: setattr(model[3], "bias", nn.Parameter(torch.zeros(1))),
            "put other parameters in place of those that were built",
        ),
    ],
)
def test_a_hook_that_changes_what_is_trained_is_refused(
    change: Any, words: str, runs: TaskRuns
) -> None:
    class Thawing(Regression):
        def after_step(self, model: Any, step: int) -> None:
            if step == 1:
                change(model)

    message = refusal(runs.begin(Thawing()))
    assert message.startswith("Thawing.after_step (") and words in message
