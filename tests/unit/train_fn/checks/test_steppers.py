"""Attributes of optimizers and schedulers: those that no state holds are put back and warned of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from train_fn.checks.attributes import StepperAttributes, steppers_held, steppers_of
from train_fn.checks.check import Moment
from train_fn.state.optim import Optimizers
from train_fn.state.train_state import TrainState
from train_fn.step.plain_attributes import PlainAttributes


class CountingSgd(torch.optim.SGD):
    """Its step size falls with its own count of calls."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * self.calls**-0.5)


class Remembering(CountingSgd):
    """Its state holds the count."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({name: state[name] for name in ("state", "param_groups")})
        self.calls = state["calls"]


class Lowering(torch.optim.lr_scheduler.LRScheduler):
    """Counts by itself, and forgets a note."""

    note = 0

    def get_lr(self) -> list[float]:
        return [
            group["initial_lr"] / (1 + self.last_epoch) for group in self.optimizer.param_groups
        ]

    def step(self, epoch: Any = None) -> None:
        super().step()
        self.note += 1

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "note"}


def state_of(optimizer: Any, scheduler: Any = None) -> TrainState:
    model = nn.Linear(2, 1)
    made = optimizer(model.parameters())
    return TrainState(
        model,
        made,
        torch.amp.GradScaler("cpu", enabled=False),
        None,
        steps_per_epoch=4,
        fingerprint="",
        scheduler=scheduler(made) if scheduler else None,
    )


def step(state: TrainState) -> None:
    state.model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()  # type: ignore[union-attr]
    if state.scheduler is not None:
        state.scheduler.step()


def put_back_after_steps(state: TrainState) -> None:
    built = PlainAttributes(steppers_of(state))
    for _ in range(3):
        step(state)
    with steppers_held(state):
        built.put_back()


def test_a_count_that_no_state_holds_is_that_of_the_build() -> None:
    state = state_of(CountingSgd)
    put_back_after_steps(state)
    assert state.optimizer.calls == 0  # type: ignore[union-attr]


def test_what_a_state_holds_goes_on() -> None:
    state = state_of(Remembering, Lowering)
    put_back_after_steps(state)
    assert state.optimizer.calls == 3  # type: ignore[union-attr]
    assert state.scheduler.last_epoch == 3 and state.scheduler.note == 1
    assert state.scheduler.get_last_lr() == [0.01 / 4]


def test_torchs_own_optimizer_and_its_moments_are_left_alone() -> None:
    state = state_of(torch.optim.Adam, lambda made: torch.optim.lr_scheduler.StepLR(made, 1))
    put_back_after_steps(state)
    [moments, _] = state.optimizer.state_dict()["state"].values()
    assert moments["step"] == 3 and state.scheduler.last_epoch == 3


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "warned"),
    [
        (CountingSgd, None, "optimizer.calls"),
        (Remembering, None, None),
        (Remembering, Lowering, "scheduler.note"),
        (torch.optim.Adam, lambda made: torch.optim.lr_scheduler.StepLR(made, 1), None),
        (torch.optim.LBFGS, None, None),
    ],
)
def test_a_first_step_that_changes_more_than_states_hold_is_warned_of_once(
    optimizer: Any, scheduler: Any, warned: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of(optimizer, scheduler)
    watch = StepperAttributes(state)
    if optimizer is torch.optim.LBFGS:
        state.optimizer.step(lambda: state.model(torch.ones(1, 2)).sum())  # type: ignore[union-attr, arg-type]
    else:
        step(state)
    watch.after(Moment.STEP, "")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (warned is not None)
    assert warned is None or f"a step changes {warned}, which no checkpoint holds" in said[0]
    step(state) if optimizer is not torch.optim.LBFGS else None
    watch.after(Moment.STEP, "")
    assert len(caplog.records) == len(said)


def test_several_optimizers_have_names() -> None:
    model = nn.Linear(2, 1)
    named = Optimizers({"gen": CountingSgd([model.weight]), "dis": CountingSgd([model.bias])})
    state = state_of(lambda parameters: named)
    assert list(steppers_of(state)) == ["optimizer gen", "optimizer dis"]
