"""Nothing that es.protect puts on a user's objects keeps them from being copied, written to a file
or compiled, and a copy begins no step."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import everstep.train as es

pytestmark = pytest.mark.usefixtures("own_place")


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "save": saved,
    "deepcopy of a copy": lambda value: copy.deepcopy(copy.deepcopy(value)),
}


class Everything:
    """All kinds of objects that a loop hands to Everstep."""

    def __init__(self, place: Path, *, has_loader: bool) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.average = AveragedModel(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        data = TensorDataset(torch.randn(24, 4))
        self.sampler = RandomSampler(data, generator=torch.Generator())
        self.loader = DataLoader(data, 8, sampler=self.sampler)
        self.followed = es.loader(self.loader)
        extra = {"data": self.followed} if has_loader else {}
        self.state = es.protect(
            self.model,
            self.optimizer,
            self.scheduler,
            {"average": self.average, **extra},
            storage=str(place),
            run_id="run",
        )

    def objects(self) -> dict[str, Any]:
        names = ("model", "average", "optimizer", "scheduler", "loader", "sampler", "followed")
        return {name: getattr(self, name) for name in names}

    def one(self, inputs: torch.Tensor) -> None:
        loss = self.model(inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.state.step(loss=loss)


@pytest.mark.parametrize("has_loader", [True, False])
@pytest.mark.parametrize("how", COPIES)
def test_all_that_a_loop_hands_over_can_be_copied_as_in_plain_torch(
    how: str, has_loader: bool, tmp_path: Path
) -> None:
    plain = Everything(tmp_path, has_loader=has_loader)
    copied: dict[str, Any] = {}
    for name, each in plain.objects().items():
        try:
            COPIES[how](each)
        except (TypeError, AttributeError):
            assert name == "scheduler", "torch's own, which holds the optimizer's method"
        else:
            copied[name] = None
    loop = Everything(tmp_path, has_loader=has_loader)
    with loop.state as state:
        inputs = (
            (x for (x,) in loop.followed.batches(state, epochs=1))
            if has_loader
            else (torch.randn(8, 4) for _ in range(3))
        )
        for each in inputs:
            loop.one(each)
            copied = {name: COPIES[how](loop.objects()[name]) for name in copied}
            copies = [copied["model"], copied["average"].module, copy.deepcopy(copied["model"])]
            for model in copies:
                model(torch.randn(8, 4)).sum().backward()
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                optimizer.step()
            assert has_loader or state._open().boundary.is_open, "a copy has begun a step"
            copied["optimizer"].step()
    assert state.step_number == 3


@pytest.mark.parametrize("how", ["pickle", "save"])
def test_a_model_in_a_file_is_read_without_everstep(how: str, tmp_path: Path) -> None:
    loop = Everything(tmp_path, has_loader=False)
    with loop.state:
        file = io.BytesIO()
        (torch.save if how == "save" else pickle.dump)(loop.model, file)
        assert b"train_fn" not in file.getvalue() and b"everstep" not in file.getvalue()
        loop.one(torch.randn(8, 4))


@pytest.mark.parametrize("made", ["before", "within"])
def test_a_loop_compiles_its_model_and_copies_of_it_whole(made: str, tmp_path: Path) -> None:
    loop = Everything(tmp_path, has_loader=False)

    def compiled(value: Any) -> Any:
        return torch.compile(value, backend="eager", fullgraph=True)

    called = compiled(loop.model) if made == "before" else None
    with loop.state as state:
        called = called or compiled(loop.model)
        for number in range(4):
            inputs = torch.randn(8, 4)
            best = copy.deepcopy(loop.model).eval()
            assert torch.equal(compiled(best)(inputs), best(inputs))
            called(inputs).square().mean().backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            state.step()
            assert not state._open().boundary.is_open, f"what is due at step {number} is not kept"
