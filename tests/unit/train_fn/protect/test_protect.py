"""es.protect in one process: what it refuses, and what it finds wrong in a loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import everstep.train as es
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from train_fn.errors import BadTask, DataChanged
from train_fn.node import node_dir
from train_fn.protect.guarantees import UP_TO_LOADER
from train_fn.protect.place import name_of
from train_fn.protect.protected import Protected
from train_fn.snapshots import store as snapshot


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "shm").mkdir()
    for module in (snapshot, node_dir):
        monkeypatch.setattr(module, "shared_memory_root", lambda: tmp_path / "shm")
    logging.getLogger("train_fn").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("train_fn").setLevel(logging.NOTSET)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.fixture
def protect(tmp_path: Path, model: nn.Module) -> Callable[..., Protected]:
    def made(**arguments: Any) -> Protected:
        given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        return es.protect(**{**given, **arguments}, storage=str(tmp_path / "storage"), run_id="run")

    return made


def data(length: int = 20) -> Any:
    return es.loader(TensorDataset(torch.randn(length, 4)), global_batch_size=8)


def train(model: nn.Module, optimizer: Any, *inputs: torch.Tensor) -> torch.Tensor:
    loss = model(*inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class NoState:
    pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": None}, r"model=…\) is missing"),
        ({"model": 3}, "model=….* is a int; pass a torch.nn.Module"),
        ({"model": {"a.b": nn.Linear(1, 1)}}, "without dots"),
        ({"optimizer": None}, r"optimizer=…\) is missing"),
        ({"optimizer": "adam"}, "pass a torch.optim.Optimizer"),
        ({"extra": {"ema": NoState()}}, r"extra.ema is a NoState without state_dict\(\)"),
        ({"torn": "maybe"}, "'refuse' or 'shadow'"),
        ({"checkpoint": {"every_steps": 0}}, "every_steps"),
    ],
)
def test_arguments_are_refused_by_name(
    arguments: dict[str, Any], words: str, protect: Callable[..., Protected]
) -> None:
    if "checkpoint" in arguments:
        with (
            pytest.raises(BadTask, match=words),
            es.protect(nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), **arguments),
        ):
            pass
        return
    with pytest.raises(BadTask, match=words):
        protect(**arguments)


@pytest.mark.parametrize(
    ("script", "name"),
    [("train.py", "train"), ("pkg/__main__.py", "pkg"), ("_own run.py", "own-run"), ("-c", "c")],
)
def test_a_run_on_its_own_is_named_by_its_script(script: str, name: str) -> None:
    assert name_of(Path(script)) == name


def test_several_optimizers_need_a_shadow(
    protect: Callable[..., Protected], model: nn.Module
) -> None:
    both = [torch.optim.SGD(model[at].parameters(), lr=0.1) for at in (0, 2)]  # type: ignore[index]
    with pytest.raises(BadTask, match="torn='shadow'"):
        protect(optimizer=both)
    protect(optimizer=both, torn="shadow")


def test_a_scheduler_that_was_not_given_is_noticed(
    protect: Callable[..., Protected], model: nn.Module
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(BadTask, match="scheduler=…"):
        protect(optimizer=optimizer)
    protect(optimizer=optimizer, scheduler=scheduler)


def late_scheduler(loop: dict[str, Any]) -> None:
    train(loop["model"], loop["optimizer"], *loop["batch"])
    loop["state"].step()
    loop["scheduler"].step()


def late_weights(loop: dict[str, Any]) -> None:
    train(loop["model"], loop["optimizer"], *loop["batch"])
    loop["state"].step()
    with torch.no_grad():
        loop["model"][0].weight.clamp_(-0.01, 0.01)


def forgotten_step(loop: dict[str, Any]) -> None:
    train(loop["model"], loop["optimizer"], *loop["batch"])


def step_twice(loop: dict[str, Any]) -> None:
    train(loop["model"], loop["optimizer"], *loop["batch"])
    loop["state"].step()
    loop["state"].step()


def no_number(loop: dict[str, Any]) -> None:
    train(loop["model"], loop["optimizer"], *loop["batch"])
    loop["state"].step(loss="small")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (late_scheduler, "changed scheduler after state.step()"),
        (late_weights, "changed the trained weights after state.step()"),
        (forgotten_step, "batch of step 1 was not committed"),
        (step_twice, "without a batch"),
        (no_number, r"loss=…\) is a str"),
    ],
)
def test_a_loop_in_the_wrong_order_is_told_so(
    body: Callable[[dict[str, Any]], None],
    words: str,
    protect: Callable[..., Protected],
    model: nn.Module,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = protect(optimizer=optimizer, scheduler=scheduler)
    loop = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "state": state}
    with pytest.raises(BadTask, match=words), state:
        for batch in data().batches(state, steps=5):
            body({**loop, "batch": batch})


def test_a_loop_that_ends_within_a_step_saves_nothing_of_it(
    protect: Callable[..., Protected], model: nn.Module, tmp_path: Path
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = protect(optimizer=optimizer)
    with pytest.raises(BadTask, match="ended within step 3"), state:
        for batch in data().batches(state):
            train(model, optimizer, *batch)
            if state.step_number == 2:
                break
            state.step()
    # What was published of an earlier step may have become a checkpoint.
    saved = CheckpointStore(RunDir(open_storage(str(tmp_path / "storage")), "run")).list()
    assert all(manifest.step <= 2 for manifest in saved)
    assert state.left is not None and "between two states" in str(state.left.problem)


def test_an_error_leaves_the_state_before_the_step_that_failed(
    protect: Callable[..., Protected], model: nn.Module, tmp_path: Path
) -> None:
    """Also what BatchNorm counted in the failed forward pass is undone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before: dict[str, torch.Tensor] = {}
    with pytest.raises(LookupError), protect(optimizer=optimizer) as state:
        for (batch,) in data().batches(state):
            if state.step_number == 4:
                before = {name: value.clone() for name, value in model.state_dict().items()}
                model(batch)
                raise LookupError("sample 3")
            state.step(loss=train(model, optimizer, batch))
    run_dir = RunDir(open_storage(str(tmp_path / "storage")), "run")
    [manifest] = CheckpointStore(run_dir).list()
    assert manifest.step == 4
    resumed = protect(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with resumed:
        assert resumed.step_number == 4
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name


def test_other_data_than_before_is_refused(
    protect: Callable[..., Protected], model: nn.Module
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with protect(optimizer=optimizer) as state:
        for batch in data().batches(state, steps=4):
            state.step(loss=train(model, optimizer, *batch))
    with pytest.raises(DataChanged, match="21 samples"), protect() as state:
        next(data(21).batches(state))


def test_a_loader_of_ones_own_is_said_not_to_be_exact(
    protect: Callable[..., Protected], model: nn.Module, tmp_path: Path
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with protect(optimizer=optimizer) as state:
        for _ in range(3):
            state.step(loss=train(model, optimizer, torch.randn(4, 4)))
    found = read_journal(RunDir(open_storage(str(tmp_path / "storage")), "run"), 1, None, 1000)[0]
    [began] = [event.data for event in found if event.kind is EventKind.TRAINING_STARTED]
    assert (began["guarantee"], began["total_steps"]) == (UP_TO_LOADER, None)
    steps = [
        point
        for event in found
        if event.kind is EventKind.METRICS
        for point in event.data["points"]
    ]
    assert [point["step"] for point in steps] == [1, 2, 3]
    assert all("samples_per_s" not in point["values"] for point in steps)


@pytest.mark.parametrize(
    ("checkpoint", "steps"),
    [
        ({}, [60]),  # less than the first interval of auto has passed
        ({"every_steps": 40}, [40, 60]),
        ({"every_steps": None, "every_s": 3600}, [60]),
    ],
)
def test_how_often_a_loop_of_its_own_saves(
    protect: Callable[..., Protected],
    tmp_path: Path,
    model: nn.Module,
    checkpoint: dict[str, Any],
    steps: list[int],
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with protect(optimizer=optimizer, checkpoint=checkpoint) as state:
        for _ in range(60):
            train(model, optimizer, torch.randn(8, 4))
            state.step()
    run_dir = RunDir(open_storage(str(tmp_path / "storage")), "run")
    assert [found.step for found in CheckpointStore(run_dir).list()] == steps


class Curriculum(nn.Module):
    """Draws from a generator of its own, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.num_calls = nn.Linear(4, 2), 0
        self.noise = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        found: torch.Tensor = self.layer(x + torch.randn(x.shape, generator=self.noise))
        return found


class Rest:
    def __init__(self, model: Curriculum) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._model.num_calls, "noise": self._model.noise.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._model.num_calls = state["calls"]
        self._model.noise.set_state(state["noise"])


@pytest.mark.parametrize("is_kept", [False, True])
def test_attributes_that_no_state_holds_are_named_once(
    is_kept: bool, protect: Callable[..., Protected], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("train_fn").setLevel(logging.WARNING)
    model = Curriculum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    extra = {"rest": Rest(model)} if is_kept else None
    state, batches = protect(model={"net": model}, optimizer=optimizer, extra=extra), data()
    with state:
        for (inputs,) in batches.batches(state, epochs=1):
            state.step(loss=train(model, optimizer, inputs))
    said = [each.getMessage() for each in caplog.records if "no checkpoint" in each.getMessage()]
    assert len(said) == (0 if is_kept else 1)
    if said:
        assert said[0].startswith("the first step changes net.num_calls, net.noise, which no")
