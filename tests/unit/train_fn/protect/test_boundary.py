"""Where a step ends: what a loop does before its training pass, and what after its commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

import everstep.train as es
from train_fn.errors import BadTask

pytestmark = pytest.mark.usefixtures("own_place")


class Loop:
    """A loop with data of its own, and buffers that every pass in training mode changes."""

    def __init__(self, place: Path, run_id: str, kind: str) -> None:
        torch.manual_seed(1)
        self.kind, self.inputs = kind, torch.randn(24, 4)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        self.teacher = AveragedModel(self.model)
        self.called = torch.compile(self.model, backend="eager") if kind == "compiled" else None
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.state = es.protect(
            self.model, self.optimizer, extra=self.teacher, storage=str(place), run_id=run_id
        )

    def train(self, dies: int | None = None) -> list[torch.Tensor]:
        with self.state as state:
            while state.step_number < 12:
                batch = self.inputs[8 * (state.step_number % 3) :][:8]
                if state.step_number == dies:
                    raise LookupError("planned")
                self.one(batch)
                if "evaluated" in self.kind and state.step_number % 3 == 0:
                    update_bn([self.inputs[:12], self.inputs[12:]], self.model)
        return [*self.model.state_dict().values(), *self.teacher.state_dict().values()]

    def one(self, batch: torch.Tensor) -> None:
        model, labels = self.called or self.model, batch.sum(1, keepdim=True)
        with torch.no_grad():
            if "pseudo" in self.kind:
                labels = labels + model(batch)
            if "teacher" in self.kind:
                labels = labels + self.teacher(batch)
        (model(batch) - labels).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.teacher.update_parameters(self.model)
        self.state.step()


@pytest.mark.parametrize("kind", ["plain", "pseudo", "teacher", "evaluated", "compiled"])
def test_each_pass_changes_buffers_once(kind: str, tmp_path: Path) -> None:
    whole = Loop(tmp_path, "whole", kind).train()
    for dies in (4, 6, 7):
        with pytest.raises(LookupError):
            Loop(tmp_path, "broken", kind).train(dies)
    broken = Loop(tmp_path, "broken", kind)
    assert all(map(torch.equal, whole, broken.train()))


def test_passes_of_which_it_is_not_known_to_which_step_they_belong_are_refused(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path, "both", "pseudo evaluated")
    with pytest.raises(BadTask, match=r"2 more passes .* after step 3 .* Call model.eval\(\)"):
        loop.train()


def test_a_loop_whose_later_steps_no_hook_sees_is_saved(tmp_path: Path) -> None:
    """Its first step calls the model, the others one of its methods."""
    loop = Loop(tmp_path, "method", "plain")
    seen: list[Callable[..., torch.Tensor]] = [loop.model]
    with loop.state as state:
        while state.step_number < 4:
            seen.append(loop.model.forward)
            seen.pop(0)(loop.inputs).square().mean().backward()
            loop.optimizer.step()
            state.step()
        training = state._open()
        assert not training.boundary.is_open, "the commit has ended, and what was due is kept"
