"""A task's own state, and attributes that no state holds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everstep.spec.sections import ScalingSpec
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.integration.trainees import Regression
from tests.support.one_rank import journal_of, one_rank, small_task_alone
from tests.unit.train_fn.loop.test_buffers import SPEC
from train_fn.checkpoints.saver import Saver
from train_fn.checks.check import Moment
from train_fn.checks.trained import ExtraKept
from train_fn.errors import BadTask
from train_fn.loop import build
from train_fn.loop.attempt import train
from train_fn.protect.arguments import parts_of
from train_fn.protect.loop_state import LoopState
from train_fn.recovery.evidence import StepFailed
from train_fn.state.tensor_tree import copy_to_cpu, digest
from train_fn.state.train_state import TaskState
from train_fn.step.trial import PlainAttributes, TrialPass
from train_fn.step.untrained import require_loaded, require_saved

NUM_PASSES = 18
"""In the run: nine global batches of ten samples, each in micro-batches of seven and three."""


class Counting(Regression):
    """Raises once, in the second of a step's two passes, if it is to."""

    break_at: int | None = None
    passes = 0

    def loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = super().loss(model, batch)
        if model.training:
            self.passes += 1
        if self.passes == self.break_at:
            self.break_at = None
            raise ConnectionError
        return found


class Keeping(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "names": {"b", "a", "c"}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


@pytest.mark.own_process
@pytest.mark.parametrize("break_at", [None, 2, 10])
def test_neither_the_warm_up_nor_a_failed_step_shows_in_the_tasks_state(
    break_at: int | None, tmp_path: Path
) -> None:
    run_dir, task = RunDir(open_storage(str(tmp_path)), "run_task"), Keeping()
    task.break_at = break_at
    with small_task_alone(tmp_path, Saver.save_if_due), pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_task", lambda spec: task)
        if break_at is not None:
            with pytest.raises(StepFailed):
                train(one_rank(SPEC, run_dir, attempt=1))
            task = Keeping()
        assert train(one_rank(SPEC, run_dir, attempt=2)) is None
    assert task.passes == NUM_PASSES


def test_attributes_are_put_back_as_the_objects_that_they_were() -> None:
    module = nn.Linear(2, 2)
    owner = type("Own", (nn.Linear,), {"__module__": "own"})(2, 2)
    owner.number, owner.tensor, owner.values, owner.last, owner.opaque = (
        1,
        torch.zeros(2),
        {"a": [1]},
        deque([1], 2),
        object(),
    )
    tensor, values, last = owner.tensor, owner.values, owner.last
    dropout = nn.Dropout(0.5)
    attributes = PlainAttributes({"": module, "own": owner, "dropout": dropout})
    assert attributes.changed() == []
    dropout.p = 0.25
    assert attributes.changed() == ["dropout.p"]
    attributes.put_back()
    assert dropout.p == 0.5
    owner.number, owner.new, owner.opaque = 2, "x", None
    owner.tensor += 1
    owner.values["a"].append(2)
    owner.last.append(5)
    owner.eval()
    assert attributes.changed() == ["own.number", "own.tensor", "own.values", "own.last", "own.new"]
    attributes.put_back()
    assert (owner.number, owner.tensor.tolist(), owner.values, list(owner.last)) == (
        1,
        [0.0, 0.0],
        {"a": [1]},
        [1],
    )
    assert (
        owner.tensor is tensor
        and owner.values is values
        and owner.last is last
        and not hasattr(owner, "new")
    )


class WithExtra(nn.Module):
    """Counts its calls in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(2, 2), [0]

    def get_extra_state(self) -> Any:
        return {"calls": torch.tensor(self.calls)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"].tolist()


def test_a_trial_leaves_nothing_in_modules_and_arrays_beside_the_model() -> None:
    criterion = nn.BatchNorm1d(2)
    task = SimpleNamespace(criteria={"norm": criterion}, table=np.zeros(2), names=np.array(["a"]))
    model = WithExtra()
    task.model, table = model, task.table
    trial = TrialPass(task, model, model.parameters(), is_fresh=True)
    extra = ExtraKept(model)
    extra.before(Moment.FIRST_PASS)
    criterion(torch.ones(3, 2))
    task.table += 1
    model.calls = [1]
    assert trial.changed_beside() == [
        "SimpleNamespace.criteria.running_mean",
        "SimpleNamespace.criteria.running_var",
        "SimpleNamespace.criteria.num_batches_tracked",
    ]
    with pytest.raises(BadTask, match=r"get_extra_state.* of the model"):
        extra.after(Moment.FIRST_PASS, "Task.loss")
    trial.put_back()
    assert (criterion.running_mean.tolist(), int(criterion.num_batches_tracked)) == ([0, 0], 0)
    assert task.table is table and table.tolist() == [0, 0]
    assert model.calls == [0]
    extra.after(Moment.FIRST_PASS, "Task.loss")


def test_a_task_and_an_extra_that_do_not_load_all_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Forgets:
        def __init__(self) -> None:
            self.seen = {"kept": 0, "lost": 0}

        def state_dict(self) -> Any:
            return dict(self.seen)

        def load_state_dict(self, state: Any) -> None:
            self.seen["kept"] = state["kept"]

    task: Any = Forgets()
    TaskState(task).load({"kept": 1, "lost": 0})
    assert caplog.messages == []
    TaskState(task).load({"kept": 1, "lost": 2})
    model, other = nn.Linear(1, 1), Forgets()
    parts = parts_of(model, torch.optim.SGD(model.parameters(), 0.1), None, {"other": other})
    saved = copy_to_cpu(LoopState(parts).state_dict())
    LoopState(parts).load_state_dict(saved)
    other.seen["lost"] = 3
    LoopState(parts).load_state_dict(saved)
    assert [text.partition(" does not load")[0].partition(" (")[0] for text in caplog.messages] == [
        "Forgets.load_state_dict",
        "es.protect: extra.other",
    ]


def test_a_model_that_does_not_load_or_tell_what_it_trains_is_refused() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    require_loaded(model, state, "Task.build_model")
    state["weight"][1, 1] += 1
    with pytest.raises(BadTask, match=r"load_state_dict\(\) of the model left out weight, so"):
        require_loaded(model, state, "Task.build_model")
    model.state_dict = lambda: {"w": model.weight.detach(), "bias": other.bias}
    with pytest.raises(BadTask, match=r"leaves out bias, or has it with other values"):
        require_saved(model, "Task.build_model")
    model.state_dict = lambda: {"w": model.weight.detach(), "bias": model.bias.half()}
    with pytest.raises(BadTask, match="leaves out bias, or"):
        require_saved(model, "Task.build_model")


def test_what_a_pass_registers_is_refused_or_taken_away() -> None:
    model = nn.Linear(2, 2)
    trial = TrialPass(SimpleNamespace(), model, model.parameters(), is_fresh=True)
    model.register_buffer("mask", torch.ones(3), persistent=False)
    trial.warm_up.look()
    model.register_buffer("count", torch.ones(3))
    with pytest.raises(BadTask, match=r"the forward pass registered count, .* in build_model"):
        trial.warm_up.look()
    trial.put_back()
    assert not hasattr(model, "mask")


def test_attributes_of_an_object_that_a_task_holds_are_followed() -> None:
    class Curriculum:
        def __init__(self) -> None:
            self.calls, self.bins, self.rng = 0, [1, 2], random.Random(1)
            self.inner = type("Inner", (), {})()

    class Holder:
        curriculum, module = None, None

    owner: Any = Holder()
    owner.curriculum = curriculum = Curriculum()
    owner.linear, owner.kind, owner.function = nn.Linear(1, 1), Curriculum, lambda: 1
    bins, attributes = curriculum.bins, PlainAttributes({"Task": owner})
    assert attributes.changed() == []
    curriculum.calls += 1
    curriculum.bins.append(3)
    first = curriculum.rng.random()
    curriculum.inner.far = 1  # two levels down
    owner.linear.note = 2
    named = ["Task.curriculum.calls", "Task.curriculum.bins", "Task.curriculum.rng"]
    assert attributes.changed() == named
    owner.curriculum = Curriculum()
    owner.curriculum.calls = 7
    attributes.put_back()
    assert owner.curriculum is curriculum and curriculum.bins is bins
    assert (curriculum.calls, bins, curriculum.rng.random()) == (0, [1, 2], first)


class Noisy(nn.Module):
    """Draws from a generator of its own, and is told how strongly by a curriculum."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.rng = nn.Linear(4, 1), torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x + torch.randn(4, generator=self.rng))
        return found


class KeepsAll(Counting):
    """Keeps what its model draws from, and what it counts, but for ``lost``."""

    lost = 0

    def build_model(self) -> nn.Module:
        self.model = Noisy()
        return self.model

    def loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.lost += model.training
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "rng": self.model.rng.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]
        self.model.rng.set_state(state["rng"])


@pytest.mark.own_process
def test_a_first_pass_leaves_no_trace_in_the_task_and_ranks_with_nothing_to_do_are_named(
    tmp_path: Path,
) -> None:
    spec = SPEC.model_copy(update={"scaling": ScalingSpec(max_workers=64)})
    task, ctx = KeepsAll(), one_rank(spec, RunDir(open_storage(str(tmp_path)), "run_task"))
    with small_task_alone(tmp_path, Saver.save_if_due), pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_task", lambda spec: task)
        assert train(ctx) is None
    [started] = journal_of(ctx).of_kind(EventKind.TRAINING_STARTED)
    [too_many] = started["warnings"]
    assert "a global batch has 2 micro-batches, so the run uses at most 2 ranks" in too_many
    assert (task.passes, task.lost) == (NUM_PASSES, NUM_PASSES)


@pytest.mark.own_process
def test_a_generator_that_the_task_s_state_keeps_goes_on_after_a_restart(tmp_path: Path) -> None:
    """The failed step's draw is undone: the losses are those of an undisturbed run."""
    losses = []
    for name, break_at in (("calm", None), ("broken", 10)):
        run_dir, found = RunDir(open_storage(str(tmp_path)), f"run_{name}"), {}
        with small_task_alone(tmp_path, Saver.save_if_due), pytest.MonkeyPatch.context() as patch:
            for attempt in (1, 2) if break_at else (1,):
                task, ctx = KeepsAll(), one_rank(SPEC, run_dir, attempt=attempt)
                patch.setattr(build, "build_task", lambda spec, task=task: task)
                task.break_at = break_at if attempt == 1 else None
                if task.break_at:
                    with pytest.raises(StepFailed):
                        train(ctx)
                else:
                    assert train(ctx) is None
                points = journal_of(ctx).points
                found |= {point["step"]: point["values"]["loss"] for point in points}
        losses.append(found)
    assert losses[0] == losses[1] and len(losses[0]) == NUM_PASSES // 2


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator(), lambda own: float(torch.rand((), generator=own))),
        (random.Random(1), lambda own: own.random()),
        (np.random.default_rng(1), lambda own: own.random()),
        (np.random.RandomState(1), lambda own: own.random()),
    ],
)
def test_a_generator_of_a_modules_own_is_named_and_begins_as_it_was(
    generator: Any, draw: Callable[[Any], float]
) -> None:
    owner = type("Own", (nn.Module,), {"__module__": "own"})()
    owner.rng = generator
    attributes = PlainAttributes({"own": owner})
    assert attributes.changed() == []
    first = draw(owner.rng)
    assert attributes.changed() == ["own.rng"]
    attributes.put_back()
    assert attributes.changed() == []
    assert owner.rng is generator
    assert draw(generator) == first


def test_a_state_that_could_not_be_loaded_is_refused_with_its_place_and_so_is_half_a_pair() -> None:
    task = Keeping()
    task.state_dict = lambda: {"a": [object()]}  # type: ignore[method-assign]
    with pytest.raises(BadTask, match=r"task/a/0 is a builtins\.object"):
        TaskState(task).capture()
    half = type("Half", (Regression,), {"state_dict": Keeping.state_dict})()
    with pytest.raises(BadTask, match=r"Half\.state_dict .* needs load_state_dict beside it"):
        TaskState(half)


def test_a_task_that_is_a_module_keeps_no_state_by_the_methods_that_all_modules_have() -> None:
    state = TaskState(type("ModuleTask", (nn.Module, Regression), {})())  # type: ignore[arg-type]
    assert not state
    assert state.capture() is None


def test_what_is_captured_is_shared_with_nothing_and_the_digest_knows_it() -> None:
    task = Keeping()
    tensor = torch.ones(2)
    task.state_dict = lambda: {"tensor": tensor}  # type: ignore[method-assign]
    captured = TaskState(task).capture()
    tensor += 1
    assert captured["tensor"].tolist() == [1.0, 1.0]
    old = {
        "step": 1,
        "ledger": {},
        "fingerprint": "",
        **dict.fromkeys(("model", "optimizer", "scaler", "ema")),
    }
    digests = [
        digest({**old, **more})
        for more in (
            {},
            {"task": None, "unsaved": {}},
            {"task": captured},
            {"task": {"a": {"x", "y"}}},
        )
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
