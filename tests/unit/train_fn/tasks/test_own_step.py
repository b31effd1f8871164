"""``training_step``: a task that steps its optimizers itself. What it reports and keeps, and what
is refused with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from everstep.wire.events import EventKind
from tests.integration.own_steps_task import Gan, Points
from tests.support.one_rank import journal_of
from tests.support.own_task_runs import TaskRuns, refusal
from train_fn.checkpoints.commit import load_checkpoint
from train_fn.loop.attempt import train
from train_fn.recovery.evidence import StepFailed
from train_fn.snapshots.store import snapshot_store
from train_fn.state.tensor_tree import tree_digest

pytestmark = pytest.mark.own_process

AUTO = {"micro_batch_size": "auto", "max_steps": 4}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskRuns:
    return TaskRuns(tmp_path, monkeypatch)


def begin(runs: TaskRuns, task: Any, **train_fields: Any) -> Any:
    return runs.begin(task, train=AUTO | train_fields)


def descend(model: Any, batch: Any, optimizer: Any, times: float = 1.0) -> None:
    (times * model(batch).square().mean()).backward()
    optimizer.step()


class Single(Gan):
    """One optimizer, which clips nothing, and a step that another class fills in."""

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def build_optimizer(self, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), 0.1)

    def training_step(self, model: Any, batch: Any, step: int, optimizers: Any) -> Any:
        self.update(model, batch, optimizers)
        return model(batch).mean()

    def update(self, model: Any, batch: Any, optimizer: Any) -> None:
        descend(model, batch, optimizer)

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"score": (model(batch).sum(), len(batch))}


# ---------------------------------------------------------------- what it does


def test_gradients_are_empty_when_a_step_begins_and_norms_are_reported(runs: TaskRuns) -> None:
    class Watched(Gan):
        def training_step(self, model: Any, batch: Any, step: int, optimizers: Any) -> Any:
            seen.append((step, [value.grad for value in model.parameters()]))
            values = super().training_step(model, batch, step, optimizers)
            norms.append(
                torch.nn.utils.get_total_norm([one.grad for one in model["critic"].parameters()])
            )
            return {name: value for name, value in values.items() if name != "loss"}

    seen: list[Any] = []
    norms: list[Any] = []
    ctx = begin(runs, Watched(), grad_clip_norm=0.01)
    assert train(ctx) is None
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert all(each is None for _, gradients in seen for each in gradients)
    points = [point["values"] for point in journal_of(ctx).points]
    assert all("loss" not in each and each["fooled"] > 0 for each in points)
    assert all(each["grad_norm_critic"] > 0.01 < each["grad_norm_generator"] for each in points)


def test_the_state_holds_each_optimizer_by_name(runs: TaskRuns) -> None:
    ctx = begin(runs, Gan())
    assert train(ctx) is None
    kept = load_checkpoint(ctx.run_dir, ctx.checkpoints.list()[-1])["optimizer"]
    assert [group["everstep_optimizer"] for group in kept["param_groups"]] == [
        "critic",
        "generator",
    ]

    class Other(Gan):
        def build_optimizer(self, model: Any) -> Any:
            found = super().build_optimizer(model)
            return {"generator": found["generator"], "critic": found["critic"]}

    message = refusal(runs.begin(Other(), after=ctx, train=AUTO | {"max_steps": 6}))
    assert "the state holds those of ['critic', 'generator'], with 2 groups" in message
    assert "in the same order, or start a new run" in message


def test_an_error_between_two_optimizers_leaves_the_state_before_the_step(runs: TaskRuns) -> None:
    class Breaks(Gan):
        def training_step(self, model: Any, batch: Any, step: int, optimizers: Any) -> Any:
            if step == 3 and breaks:
                optimizers["critic"].zero_grad()
                model["critic"](batch).mean().backward()
                optimizers["critic"].step()
                raise LookupError("between two")
            return super().training_step(model, batch, step, optimizers)

    breaks = True
    ctx = begin(runs, Breaks())
    with pytest.raises(StepFailed, match="between two") as raised:
        train(ctx)
    assert (raised.value.error.step, raised.value.error.snapshot_step) == (3, 3)
    [label] = snapshot_store(ctx).labels()
    assert label.step == 3
    breaks = False
    again = runs.begin(Breaks(), after=ctx, train=AUTO)
    assert train(again) is None
    calm = runs.begin(Breaks(), name="run_calm", train=AUTO)
    assert train(calm) is None
    weights = [load_checkpoint(each.run_dir, each.checkpoints.list()[-1]) for each in (again, calm)]
    assert tree_digest(weights[0]["model"]) == tree_digest(weights[1]["model"])
    assert tree_digest(weights[0]["optimizer"]) == tree_digest(weights[1]["optimizer"])
    assert journal_of(again).of_kind(EventKind.RESTORED)[0]["source"] == "snapshot"


# ---------------------------------------------------------------- what does not go with it


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(Points().x)


class OfStream(Gan):
    def build_datasets(self) -> dict[str, Any]:
        return {"train": Stream(), "val": None}


class OfLazy(Single):
    def build_model(self) -> nn.Module:
        return nn.LazyLinear(1)


ITERABLE = "train.on_out_of_memory is smaller, but the train set of"


def test_settings_that_do_not_go_with_it(runs: TaskRuns) -> None:
    of_losses = type("OfLosses", (WithoutStep, OfStream), {})
    for fields, task, words in (
        ({"micro_batch_size": 4}, Gan, "train.micro_batch_size is 4, but Gan.training_step ("),
        ({"precision": "bf16"}, Gan, "train.precision is bf16, but Gan.training_step ("),
        ({"compile": True}, Gan, "train.compile is set, but Gan.training_step ("),
        ({"unused_parameters": "allow"}, Gan, "train.unused_parameters is allow, which is always"),
        ({"on_out_of_memory": "smaller"}, Gan, "train.on_out_of_memory is smaller, but Gan.train"),
        ({"on_out_of_memory": "smaller", "max_steps": 3}, of_losses, f"{ITERABLE} OfLosses"),
        ({"max_steps": 3}, OfStream, "the train set of OfStream.build_datasets ("),
        ({}, OfLazy, "OfLazy.build_model ("),
    ):
        assert refusal(begin(runs, task(), **fields)).startswith(words)


class WithoutStep(Gan):
    training_step = None  # type: ignore[assignment]

    def loss(self, model: Any, batch: Any) -> Any:
        return model["critic"](batch).sum(), len(batch)


class InList(Gan):
    def build_optimizer(self, model: Any) -> Any:
        return list(super().build_optimizer(model).values())


class OfNone(Gan):
    def build_optimizer(self, model: Any) -> Any:
        return {"critic": super().build_optimizer(model)["critic"], "generator": None}


class WithScheduler(Gan):
    def build_scheduler(self, optimizer: Any, total_steps: int) -> Any:
        return None


class MeasuresNothing(Gan):
    metrics = None  # type: ignore[assignment]


def test_what_a_task_must_return(runs: TaskRuns) -> None:
    for task, words in (
        (WithoutStep, "returned several optimizers, but one loss has one step. Give the task the"),
        (InList, "must return several optimizers as a dict of names, not ["),
        (OfNone, "optimizer 'generator': must return a torch.optim.Optimizer, not None"),
        (WithScheduler, "builds one scheduler, and build_optimizer several optimizers. Use sched"),
        (MeasuresNothing, "MeasuresNothing has no loss and has no method metrics, so that nothing"),
    ):
        assert words in refusal(begin(runs, task()))


def no_update(self: Any, model: Any, batch: Any, optimizer: Any) -> None:
    model(batch).mean().backward()


def by_closure(self: Any, model: Any, batch: Any, optimizer: Any) -> None:
    optimizer.step(lambda: model(batch).mean())


def in_eval(self: Any, model: Any, batch: Any, optimizer: Any) -> None:
    descend(model.eval(), batch, optimizer)


def to_infinity(self: Any, model: Any, batch: Any, optimizer: Any) -> None:
    descend(model, batch, optimizer, times=float("inf"))


def other_rate(self: Any, model: Any, batch: Any, optimizer: Any) -> None:
    descend(model, batch, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5


def test_what_a_step_must_not_do(runs: TaskRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    for update, words in (
        (no_update, "stepped no optimizer: call backward() and then step()"),
        (by_closure, "calls step(closure), which computes gradients after they were averaged"),
        (in_eval, "left modules in another mode, train or eval, than before"),
        (other_rate, "a learning rate was changed past the spec"),
    ):
        monkeypatch.setattr(Single, "update", update)
        assert words in refusal(begin(runs, Single()))


def test_a_norm_that_is_not_finite_ends_the_step_before_its_update(
    runs: TaskRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Single, "update", to_infinity)
    with pytest.raises(StepFailed, match="the gradient norm of step 1 is"):
        train(begin(runs, Single(), grad_clip_norm=1.0))


def test_a_step_outside_of_it_is_refused(runs: TaskRuns) -> None:
    class Late(Single):
        def on_epoch_end(self, model: Any, epoch: int, metrics: Any) -> None:
            self.kept.step()

        def build_optimizer(self, model: Any) -> Any:
            self.kept = super().build_optimizer(model)
            return self.kept

    words = "an optimizer steps outside of Late.training_step ("
    assert words in refusal(begin(runs, Late(), max_steps=20))


def test_what_a_step_must_return(runs: TaskRuns) -> None:
    given: list[Any] = []

    class Answers(Single):
        def training_step(self, model: Any, batch: Any, step: int, optimizers: Any) -> Any:
            super().training_step(model, batch, step, optimizers)
            return given[step]

    for answers, words in (
        ([torch.zeros(2)], "returned tensor([0., 0.]) as 'loss'; return the loss, or metrics by"),
        ([{"loss": "low"}], "returned 'low' as 'loss'"),
        ([{3: 1.0}], "returned 1.0 as 3"),
        ([{f"m{at}": 1.0 for at in range(17)}], "returned 17 metrics; return at most 16"),
        ([{"loss": 1.0}, {"lost": 1.0}], "returned the metrics ['lost'], where rank 0 returned"),
    ):
        given = answers
        assert words in refusal(begin(runs, Answers()))


def test_a_task_may_report_nothing(runs: TaskRuns) -> None:
    class Silent(Single):
        def training_step(self, model: Any, batch: Any, step: int, optimizers: Any) -> None:
            super().training_step(model, batch, step, optimizers)

    ctx = begin(runs, Silent())
    assert train(ctx) is None
    assert all("loss" not in point["values"] for point in journal_of(ctx).points)
