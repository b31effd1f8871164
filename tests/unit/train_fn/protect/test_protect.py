"""es.protect in one process: what it refuses, and what it finds wrong in a loop."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everstep.train as es
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from train_fn.errors import BadTask, DataChanged, PeersGone
from train_fn.protect import training
from train_fn.protect.arguments import Torn, parts_of
from train_fn.protect.commits import Commits
from train_fn.protect.loop_state import LoopState
from train_fn.protect.protected import Protected
from train_fn.protect.training import UP_TO_LOADER

pytestmark = pytest.mark.usefixtures("own_place")


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
    inputs = torch.arange(4.0 * length).reshape(length, 4).sin()
    return es.loader(TensorDataset(inputs), global_batch_size=8)


def train(model: nn.Module, optimizer: Any, *inputs: torch.Tensor) -> torch.Tensor:
    loss = model(*inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class NoState:
    pass


class Forgetful(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"weight": self.weight}


class Calls(nn.Linear):
    """Counts its calls in its extra state."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_a_failed_step_leaves_nothing_in_an_extra_state_and_no_buffer_may_come() -> None:
    model = nn.Sequential(Calls(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = LoopState(parts_of({"net": model}, optimizer, None, None))
    train(model, optimizer, torch.ones(1, 4))
    state.note_parts()
    model(torch.ones(1, 4))
    left = state.last_committed()
    assert isinstance(left, dict)
    assert left["model"]["net.0._extra_state"] == {"calls": 1}
    assert left["model"].keys() == state.state_dict()["model"].keys()
    model.register_buffer("late", torch.ones(1))
    with pytest.raises(BadTask, match=r"net\.late was added to the model"):
        state.state_dict()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": None}, r"model=…\) is missing"),
        ({"model": 3}, "model=….* is a int; pass a torch.nn.Module"),
        ({"model": {"a.b": nn.Linear(1, 1)}}, "without dots"),
        ({"model": Forgetful(1, 1)}, r"state_dict\(\) leaves out bias, or"),
        ({"optimizer": None}, r"optimizer=…\) is missing"),
        ({"optimizer": "adam"}, "pass a torch.optim.Optimizer"),
        ({"extra": {"ema": NoState()}}, r"extra.ema is a NoState without state_dict\(\)"),
        ({"torn": "maybe"}, "'refuse' or 'shadow'"),
        ({"heirs": False}, r"es\.protect\(heirs=False\) .* sharded models alone. Leave it out"),
        ({"checkpoint": {"every_steps": 0}}, "every_steps"),
    ],
)
def test_arguments_are_refused_by_name(
    arguments: dict[str, Any], words: str, protect: Callable[..., Protected]
) -> None:
    if "checkpoint" in arguments:
        linear = nn.Linear(1, 1)
        sgd = torch.optim.SGD(linear.parameters())
        with (
            pytest.raises(BadTask, match=words),
            es.protect(linear, sgd, run_id="run", **arguments),
        ):
            pass
        return
    with pytest.raises(BadTask, match=words):
        protect(**arguments)


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


def test_two_loaders_side_by_side_are_told_apart_from_a_forgotten_step(
    protect: Callable[..., Protected], model: nn.Module
) -> None:
    state, optimizer = protect(), torch.optim.SGD(model.parameters(), lr=0.1)
    one, other = data(), data()
    with pytest.raises(BadTask, match=r"two es\.loader\(dataset\) give batches to step 1"), state:
        sides = (each.batches(state, epochs=9) for each in (one, other))
        for (first,), _ in zip(*sides, strict=True):
            train(model, optimizer, first)
            state.step()
    state = protect(optimizer=optimizer, fresh=True)
    with state:  # one after the other is fine
        for epoch, each in enumerate((one, other), start=1):
            for (inputs,) in each.batches(state, epochs=epoch):
                train(model, optimizer, inputs)
                state.step()
    assert state.step_number == 6


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as it is written: another optimizer takes the step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    @torch.no_grad()
    def climb(self) -> None:
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["old"] = weight.detach().clone()
            weight.add_(weight.grad, alpha=0.05)
            weight.grad = None

    @torch.no_grad()
    def back_and_step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.copy_(self.state[weight].pop("old"))
        self.base.step()


def test_a_loop_that_climbs_before_its_step_is_told_what_to_pass(
    protect: Callable[..., Protected], model: nn.Module
) -> None:
    def loop(state: Protected, sharp: Sharp, dies: int | None = None) -> None:
        with state:
            for (inputs,) in data().batches(state, epochs=4):
                model(inputs).square().mean().backward()
                sharp.climb()
                if state.step_number == dies:
                    raise LookupError("planned")
                model(inputs).square().mean().backward()
                sharp.back_and_step()
                sharp.zero_grad()
                state.step()

    sharp = Sharp(model.parameters())
    with pytest.raises(BadTask, match=r"pass that, optimizer\.base, with torn='shadow'"):
        loop(protect(optimizer=sharp), sharp)
    begun = copy.deepcopy(model.state_dict())

    def trained(torn: Torn, dies: int | None = None, **options: bool) -> torch.Tensor:
        model.load_state_dict(begun)
        sharp = Sharp(model.parameters())
        loop(protect(optimizer=sharp.base, torn=torn, **options), sharp, dies)
        return next(model.parameters()).detach().clone()

    for torn in get_args(Torn):
        whole = trained(torn, fresh=True)
        with pytest.raises(LookupError):
            trained(torn, 5, fresh=True)
        assert torch.equal(trained(torn), whole), "nobody leaves the weights that it climbed to"


def test_without_a_sign_of_the_next_step_a_late_change_is_refused_at_any_step(
    protect: Callable[..., Protected], model: nn.Module
) -> None:
    """The model is never called itself, and the data is the loop's own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = protect(optimizer=optimizer, scheduler=scheduler)
    words = r"changed scheduler after state.step\(\) .* or read the data by es.loader"
    with pytest.raises(BadTask, match=words), state:
        while state.step_number < 9:
            loss = model[2](model[0](torch.randn(8, 4))).square().mean()  # type: ignore[index]
            loss.backward()
            optimizer.step()
            state.step(loss=loss)
            if state.step_number == 6:
                scheduler.step()
    assert state.step_number == 6


def test_a_step_counts_as_committed_before_its_rank_waits_for_peers_that_may_be_dead(
    protect: Callable[..., Protected], model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing says that a step begins, its commit also saves, which all ranks agree on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, committed = protect(optimizer=optimizer), list[int]()

    def gone(self: Commits) -> None:
        raise PeersGone("planned")

    with pytest.raises(PeersGone, match="planned"), state:
        training = state._open()
        on_commit = lambda: committed.append(state.step_number)  # noqa: E731
        object.__setattr__(training, "ctx", replace(training.ctx, on_commit=on_commit))
        while True:
            loss = model[2](model[0](torch.randn(8, 4))).square().mean()  # type: ignore[index]
            loss.backward()
            optimizer.step()
            if state.step_number == 2:
                monkeypatch.setattr(training.session.saver, "is_due", lambda: True)
                monkeypatch.setattr(Commits, "read", gone)
            state.step(loss=loss)
    assert state.left is not None and state.left.problem is None
    assert committed == [1, 2, 3], "step 3 is kept, so a record of it must not lack it"


@pytest.mark.slow
def test_a_loop_that_changes_what_was_restored_is_refused(
    protect: Callable[..., Protected], model: nn.Module
) -> None:
    pretrained = {name: value.clone() for name, value in model.state_dict().items()}
    for begins in (0, 4):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = protect(optimizer=optimizer)
        words = "changed the trained weights between `with state:` .* state of step 4"
        expected = BadTask if begins else LookupError
        with pytest.raises(expected, match=words if begins else "planned"), state:
            assert state.step_number == begins
            model.load_state_dict(pretrained)
            for batch in data().batches(state, epochs=9):
                if state.step_number == 4:
                    raise LookupError("planned")
                state.step(loss=train(model, optimizer, *batch))


@pytest.mark.parametrize("torn", ["refuse", "shadow"])
@pytest.mark.parametrize("shape", ["flat", "nested"])
def test_what_a_loop_does_at_an_epoch_s_end_is_done_again_if_it_fails_there(
    shape: str, torn: str, protect: Callable[..., Protected], model: nn.Module
) -> None:
    """An evaluation fails that changes nothing of the state."""
    evaluated: list[int] = []
    for fails in (True, False):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = protect(optimizer=optimizer, torn=torn)
        batches = data()

        def follow() -> None:
            if state.step_number % len(batches) == 0:  # noqa: B023
                if fails and state.step_number == 6:  # noqa: B023
                    raise LookupError("in an evaluation")
                evaluated.append(state.step_number)  # noqa: B023

        with pytest.raises(LookupError) if fails else nullcontext(), state:
            assert state.step_number == 0 if fails else 0 < state.step_number < 6
            assert fails or torn == "refuse" or state.step_number == 5
            for epoch in [2] if shape == "flat" else range(state.epoch, 3):
                for batch in batches.batches(state, epochs=epoch + 1):
                    state.step(loss=train(model, optimizer, *batch))
                    follow() if shape == "flat" else None
                follow() if shape == "nested" else None
    assert [*dict.fromkeys(evaluated)] == [3, 6, 9]


def test_a_loop_that_ends_within_a_step_saves_nothing_of_it(
    protect: Callable[..., Protected], model: nn.Module, tmp_path: Path
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = protect(optimizer=optimizer)
    with pytest.raises(BadTask, match="ended within step 3"), state:
        for batch in data().batches(state, epochs=9):
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
        for (batch,) in data().batches(state, epochs=9):
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
    protect: Callable[..., Protected], model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with protect(optimizer=optimizer) as state:
        for batch in data().batches(state, steps=4):
            state.step(loss=train(model, optimizer, *batch))
    monkeypatch.setattr(training, "_begun", {})  # as in a new process
    torch.manual_seed(1)
    with pytest.raises(DataChanged, match="21 samples"), protect() as state:
        next(data(21).batches(state, epochs=9))


@pytest.mark.parametrize(
    ("asks", "end", "total", "expected"),
    [
        ("epoch", "epoch", None, [None, None]),
        ("epoch", "epoch", 9, [9, 9]),
        ("nothing", {"epochs": 3}, None, [None, 9]),
    ],
)
def test_the_end_of_an_epoch_is_never_taken_for_the_run_s(
    asks: str,
    end: Any,
    total: int | None,
    expected: list[int | None],
    protect: Callable[..., Protected],
    model: nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    for dies in (4, None):
        monkeypatch.setattr(training, "_begun", {})  # as in a new process
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = protect(optimizer=optimizer, total_steps=total)
        with suppress(LookupError), state:
            read = data()
            for epoch in range(state.epoch, 3) if asks == "epoch" else [0]:
                limit = {"epochs": epoch + 1} if end == "epoch" else end
                for batch in read.batches(state, **limit):
                    if state.step_number == dies:
                        raise LookupError("planned")
                    seen.append((epoch, state.step_number))
                    state.step(loss=train(model, optimizer, *batch))
    assert [step for _, step in seen] == list(range(9))
    if asks == "epoch":
        assert [epoch for epoch, _ in seen] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    run_dir = RunDir(open_storage(str(tmp_path / "storage")), "run")
    found = read_journal(run_dir, 1, None, 1000)[0]
    began = [event.data for event in found if event.kind is EventKind.TRAINING_STARTED]
    assert [each["total_steps"] for each in began] == 2 * expected


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_loop_says_how_long_it_waited_for_its_loader(
    is_followed: bool, protect: Callable[..., Protected], model: nn.Module, tmp_path: Path
) -> None:
    class Slow(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.01)
            return super().__getitem__(index)

    optimizer, dataset = torch.optim.SGD(model.parameters(), lr=0.1), Slow(torch.randn(24, 4))
    loaded = es.loader(dataset, global_batch_size=8)
    if is_followed:
        loaded = es.loader(DataLoader(dataset, batch_size=8))
    with protect(optimizer=optimizer, extra={"data": loaded} if is_followed else {}) as state:
        for batch in loaded.batches(state, epochs=1):
            state.step(loss=train(model, optimizer, *batch))
    found = read_journal(RunDir(open_storage(str(tmp_path / "storage")), "run"), 1, None, 1000)[0]
    values = [
        point["values"]
        for event in found
        if event.kind is EventKind.METRICS
        for point in event.data["points"]
    ]
    assert "data_wait" not in values[0], "no step before it"
    assert len(values) == 3 and all(0.3 < each["data_wait"] <= 1 for each in values[1:])


def test_a_loader_for_a_loop_to_iterate_itself_is_refused(
    protect: Callable[..., Protected],
) -> None:
    """It has read a batch ahead when a step is whole."""
    with pytest.raises(BadTask, match=r"data = es\.loader\(loader\)"):
        protect(extra={"data": object.__new__(DataLoader)})


def test_batches_without_an_end_are_refused_before_a_step(
    protect: Callable[..., Protected],
) -> None:
    with pytest.raises(BadTask, match=r"epochs=epoch \+ 1\)"), protect() as state:
        for _ in range(5):
            for _ in data().batches(state):
                raise AssertionError("a batch is there")


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


def adds_up(loop: dict[str, Any]) -> None:
    loop["model"](loop["inputs"]).square().mean().backward()
    if loop["state"].step_number % 2:
        loop["optimizer"].step()
        loop["optimizer"].zero_grad()
    loop["state"].step()


def replaces_its_optimizer(loop: dict[str, Any]) -> None:
    if loop["state"].step_number == 1:
        loop["optimizer"] = torch.optim.SGD(loop["model"].parameters(), lr=0.1)
    loop["state"].step(loss=train(loop["model"], loop["optimizer"], loop["inputs"]))


def adds_weights(loop: dict[str, Any]) -> None:
    if loop["state"].step_number == 1:
        loop["optimizer"].add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    loop["state"].step(loss=train(loop["model"], loop["optimizer"], loop["inputs"]))


@pytest.mark.parametrize(
    ("body", "words", "step"),
    [
        (adds_up, r"for step 1 while gradients are being added up.* after optimizer.step\(\)", 0),
        (replaces_its_optimizer, "step 2 changed the trained weights, but no optimizer", 1),
        (adds_weights, "the optimizer holds 7 weights instead of 6", 1),
    ],
)
def test_what_no_state_would_hold_is_refused_at_the_first_commit(
    body: Callable[[dict[str, Any]], None],
    words: str,
    step: int,
    protect: Callable[..., Protected],
    model: nn.Module,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = protect(optimizer=optimizer)
    loop = {"model": model, "optimizer": optimizer, "state": state}
    with pytest.raises(BadTask, match=words), state:
        for (inputs,) in data().batches(state, steps=5):
            loop["inputs"] = inputs
            body(loop)
    assert state.step_number == step


def test_a_step_that_is_left_out_is_committed(
    protect: Callable[..., Protected], model: nn.Module
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with protect(optimizer=optimizer) as state:
        for (inputs,) in data().batches(state, steps=4):
            optimizer.zero_grad()
            if state.step_number == 2:  # before the pass: the gradients of step 2 are used up
                state.step()
                continue
            loss = model(inputs).square().mean()
            loss.backward()
            if state.step_number == 3:
                optimizer.zero_grad()
            else:
                optimizer.step()
            state.step(loss=loss)
    assert state.step_number == 4


def test_weights_of_no_model_are_refused(
    protect: Callable[..., Protected], model: nn.Module
) -> None:
    loss = nn.Linear(2, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    with pytest.raises(BadTask, match=r"holds 2 weights of no model .* shape \(3, 2\).*'loss'"):
        protect(optimizer=optimizer)
    protect(model={"net": model, "loss": loss}, optimizer=optimizer)
    protect(optimizer=optimizer, extra={"loss": loss})


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.layer = nn.Linear(4, 2), nn.Linear(4, 2)
        self.layer.requires_grad_(False)
        self.head = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.student(inputs) - self.layer(inputs))
        return found


@pytest.mark.slow
def test_a_teacher_that_follows_and_layers_that_thaw_are_as_in_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    def run(run_id: str, dies: int | None) -> Teacher:
        torch.manual_seed(2)
        net = Teacher()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        state = es.protect(net, optimizer, storage=str(tmp_path / "s"), run_id=run_id)
        inputs = torch.arange(80.0).reshape(20, 4).cos()
        with state:
            for (batch,) in es.loader(TensorDataset(inputs), 8).batches(state, steps=8):
                loss = net(batch).square().mean()
                loss.backward()
                if state.step_number == dies:
                    raise LookupError("planned")
                optimizer.step()
                optimizer.zero_grad()
                state.step(loss=loss)
                with torch.no_grad():
                    for slow, fast in zip(
                        net.layer.parameters(), net.student.parameters(), strict=True
                    ):
                        slow.lerp_(fast, 0.1)
                if state.step_number == 3:
                    net.head.requires_grad_(True)
        return net

    whole = run("whole", None)
    with pytest.raises(LookupError):
        run("broken", 5)
    again = run("broken", None)
    assert again.head.weight.requires_grad and not again.layer.weight.requires_grad
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


class Unordered:
    """Lists its files in another order in each process."""

    def __init__(self, names: list[int]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), float(self.names[index])) + torch.rand(4)


@pytest.mark.slow
@pytest.mark.parametrize("dies", [4, 6])
def test_data_in_another_order_after_a_restart_is_refused_within_an_epoch(
    dies: int,
    protect: Callable[..., Protected],
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = list(range(24))
    for listed in (names, names[::-1]):
        monkeypatch.setattr(training, "_begun", {})  # as in a new process
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = protect(optimizer=optimizer)
        is_refused = listed != names and dies % 3
        expected = DataChanged if is_refused else LookupError
        words = r"not the same: batch of its last batch.*sort what" if is_refused else "planned"
        with pytest.raises(expected, match=words), state:
            for inputs in es.loader(Unordered(listed), 8).batches(state, epochs=9):
                if state.step_number == (dies if listed == names else dies + 1):
                    raise LookupError("planned")
                state.step(loss=train(model, optimizer, inputs))
