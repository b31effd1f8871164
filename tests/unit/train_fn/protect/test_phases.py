"""Several trainings of one process, as folds, seeds or phases of a script: each is one of its own,
and none takes over the state of another."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everstep.train as es
from train_fn.errors import BadTask, DataChanged
from train_fn.protect import training
from train_fn.protect.protected import Protected
from train_fn.standalone.rank import LocalPlace

pytestmark = pytest.mark.usefixtures("own_place")


@pytest.fixture
def as_new_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    launches = itertools.count()

    def forget() -> None:
        place = LocalPlace(0, 1, 0, 1, os.uname().nodename, f"launch {next(launches)}")
        monkeypatch.setattr(training, "_begun", {})
        monkeypatch.setattr(training, "place_alone", lambda: place)

    return forget


class Fold:
    """One training, with a name that all of them share."""

    def __init__(self, place: Path, seed: int = 0, rate: float = 0.1, **given: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, given.get("width", 3)), nn.ReLU())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)
        self.optimizer.param_groups[0] |= {"initial_lr": rate, "lr": given.get("now", rate)}
        inputs = torch.arange(96.0).reshape(24, 4).sin() + given.get("fold", 0)
        rows = TensorDataset(inputs)
        extra = es.loader(DataLoader(rows, batch_size=8)) if given.get("follows") else None
        self.data: Any = extra or es.loader(rows, global_batch_size=8)
        where: Any = {"storage": str(place), "run_id": "run", "fresh": given.get("fresh")}
        self.state = es.protect(self.model, self.optimizer, extra=extra, **where)
        self.num_made = 0

    def train(self, dies: int | None = None) -> dict[str, torch.Tensor]:
        with self.state:
            for (inputs,) in self.data.batches(self.state, epochs=2):
                if self.state.step_number == dies:
                    raise LookupError("planned")
                loss = self.model(inputs).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.state.step(loss=loss)
                self.num_made += 1
        return self.model.state_dict()


OTHERS = [
    ({"seed": 1}, BadTask, "began with another seed"),
    ({"rate": 0.2}, BadTask, "began with another optimizer"),
    ({"width": 5}, BadTask, "began with another model"),
    ({"fold": 1}, DataChanged, "data of es.loader changed"),
]
FOLLOWED = ({"fold": 1, "follows": True}, DataChanged, "is another one than before")


@pytest.mark.parametrize(("changed", "error", "words"), [*OTHERS, FOLLOWED])
def test_a_finished_training_is_given_back_to_the_loop_that_began_it_alone(
    changed: dict[str, Any],
    error: type[Exception],
    words: str,
    tmp_path: Path,
    as_new_process: Callable[[], None],
) -> None:
    """A script that leaves out what it finds done makes the second training first after a
    restart."""
    kind = {"follows": "follows" in changed}
    done = {name: value.clone() for name, value in Fold(tmp_path, **kind).train().items()}
    other = Fold(tmp_path, **changed)
    other.train()
    assert other.num_made == 6
    as_new_process()
    with pytest.raises(error, match=words):
        Fold(tmp_path, **changed).train()
    as_new_process()
    again = Fold(tmp_path, **kind)
    assert all(torch.equal(value, done[name]) for name, value in again.train().items())
    assert again.num_made == 0
    as_new_process()
    anew = Fold(tmp_path, fresh=True, **changed)
    assert anew.train() and anew.num_made == 6


@pytest.mark.parametrize(("changed", "error", "words"), OTHERS)
def test_what_an_error_left_goes_on_in_its_own_loop_alone(
    changed: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    """A search goes on with the next candidate where one has failed."""
    whole = Fold(tmp_path / "whole").train()
    for dies in (4, 5):
        with pytest.raises(LookupError):
            Fold(tmp_path).train(dies)
    with pytest.raises(error, match=words):
        Fold(tmp_path, **changed).train()
    again = Fold(tmp_path, now=0.05)  # as a scheduler leaves it
    assert all(torch.equal(value, whole[name]) for name, value in again.train().items())
    assert again.num_made == 1


def test_a_script_that_sets_no_seed_gets_its_finished_training_back(
    tmp_path: Path, as_new_process: Callable[[], None]
) -> None:
    Fold(tmp_path, seed=1 << 50).train()
    as_new_process()
    again = Fold(tmp_path, seed=1 << 51)  # as torch draws another one in each process
    assert again.train() and again.num_made == 0


def test_an_interrupted_training_says_that_another_learning_rate_is_not_used(
    tmp_path: Path, as_new_process: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(LookupError):
        Fold(tmp_path).train(4)
    as_new_process()
    caplog.set_level(logging.WARNING, "train_fn")
    other = Fold(tmp_path, rate=0.2)
    other.train()
    assert other.num_made == 2 and other.optimizer.param_groups[0]["lr"] == 0.1
    assert "begun with another optimizer or its options: the learning rate" in caplog.text


def test_phases_of_one_model_go_on_where_they_were(
    tmp_path: Path, as_new_process: Callable[[], None]
) -> None:
    """A second phase has another optimizer, and draws what follows the first one's end."""

    def phases(name: str, dies: int | None = None) -> tuple[list[int], list[torch.Tensor]]:
        torch.manual_seed(3)
        model, steps, drawn = nn.Linear(4, 2), list[int](), list[torch.Tensor]()
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.SGD):
            drawn.append(torch.randn(3))
            optimizer = kind(model.parameters(), lr=0.01)
            state = es.protect(model, optimizer, storage=str(tmp_path), run_id=name)
            with state:
                steps.append(state.step_number)
                while state.step_number < 5:
                    if len(steps) == 2 and state.step_number == dies:
                        raise LookupError("planned")
                    loss = model(torch.randn(8, 4)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    state.step(loss=loss)
        return steps, [*drawn, *model.state_dict().values()]

    begun, whole = phases("whole")
    with pytest.raises(LookupError):
        phases("broken", dies=3)
    as_new_process()
    again, found = phases("broken")
    assert (begun, again) == ([0, 0, 0], [5, 3, 0])
    assert all(map(torch.equal, whole, found))


def test_a_training_within_another_one_is_refused(tmp_path: Path) -> None:
    outer, inner = Fold(tmp_path), Fold(tmp_path)
    with (
        pytest.raises(BadTask, match=r"within another one.* as lists to one call"),
        outer.state,
        inner.state,
    ):
        pass
    assert isinstance(outer.state, Protected) and Fold(tmp_path / "next").train()
