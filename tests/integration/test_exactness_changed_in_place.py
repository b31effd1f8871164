"""Weights and samples that a task's code changes where only some ranks would see it: refused at
every world size. So is another length of the data in the next attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from everstep.wire.events import EventKind
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness_failures import errors_of
from tests.integration.test_exactness_hostile import HalvedCopies, Rows
from tests.integration.test_exactness_small_batches import small_spec
from tests.support.two_groups import only_in_chaos
from train_fn.step.precision import BITWISE_WHERE_POSSIBLE, FLOAT_TOLERANCE

HERE = "tests.integration.test_exactness_changed_in_place"


class LongRows(Rows):
    """Three micro-batches of evaluation, so that ranks measure different numbers of them."""

    def __init__(self, num_samples: int = 300) -> None:
        self.x = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)


class Task(HalvedCopies):
    def build_datasets(self) -> dict[str, Any]:
        return {"train": Rows(), "val": LongRows()}


class ShrinksInMetrics(Task):
    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        loss = self.loss(model, batch)
        model.weight.data.mul_(0.9)
        return {"loss": loss}


class ShrinksLater(Task):
    """The first micro-batch, which is tried before the first step, changes nothing."""

    calls = 0

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        self.calls += 1
        if self.calls == 3:
            model.weight.data.mul_(0.9)
        return {"loss": self.loss(model, batch)}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class ShrinksInLoss(Task):
    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        model.weight.data.mul_(0.99)
        return super().loss(model, batch)


class HalvesWhatItMeasures(Task):
    copies = False

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        rows, y = batch
        return F.mse_loss(model(torch.stack(rows))[:, 0], y, reduction="sum"), len(y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        for row in batch[0]:
            row.mul_(0.5)
        return {"loss": self.loss(model, batch)}


class HalvesItsCopies(HalvesWhatItMeasures):
    copies = True


class RankDependentHook(Task):
    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        if torch.distributed.get_rank() == 1:
            model.weight.mul_(0.9)


class RankDependentMask(Task):
    """What its hook leaves apart is trained by no optimizer."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("mask", torch.ones(4))
        return model

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        model.register_buffer("mask", torch.arange(4) % (2 + torch.distributed.get_rank()) + 0.0)


class RankDependentMode(Task):
    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        model.train(torch.distributed.get_rank() == 0)


class LateInAfterStep(RankDependentMask):
    """Ranks are apart from the third of four steps on, which is none that is looked at."""

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        pass

    def after_step(self, model: nn.Module, step: int) -> None:
        if step == 2:
            model.mask.add_(torch.distributed.get_rank())


class Hook(Task):
    """What it draws is the same on all ranks."""

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        model.weight.mul_(0.9 + 0.1 * torch.rand(1))


class Undetermined(Task):
    def build_model(self) -> nn.Module:
        torch.use_deterministic_algorithms(False)
        return super().build_model()


class UndeterminedLater(Task):
    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        torch.use_deterministic_algorithms(False)
        return super().loss(model, batch)


def job_of(setup: str, world_size: int, tmp_path: Path, **changes: Any) -> Job:
    run_dir = make_run_dir(tmp_path, f"run_{setup}_{world_size}")
    return Job(run_dir, small_spec(16, 4, epochs=2), world_size, setup=f"{HERE}:{setup}", **changes)


@pytest.mark.parametrize("world_size", [2, *only_in_chaos(1, 3)])
@pytest.mark.parametrize(
    ("setup", "source", "problem"),
    [
        ("ShrinksInMetrics", "ShrinksInMetrics.metrics", "changes trained parameters: weight."),
        ("ShrinksInLoss", "ShrinksInLoss.loss", "changes trained parameters: weight."),
        (
            "HalvesWhatItMeasures",
            "HalvesWhatItMeasures.metrics",
            "changes its batch in place, and with it the samples",
        ),
    ],
)
def test_changes_that_ranks_would_not_share_are_refused_before_the_first_step(
    setup: str, source: str, problem: str, world_size: int, tmp_path: Path
) -> None:
    outcomes = run_ranks(job_of(setup, world_size, tmp_path), tmp_path)
    [message] = {error.message for error in errors_of(outcomes) if error.type == "BadTask"}
    assert message.startswith(source)
    assert problem in message
    assert outcomes[0].losses == {}


def test_an_evaluation_that_changes_weights_later_ends_the_run_too(tmp_path: Path) -> None:
    outcomes = run_ranks(job_of("ShrinksLater", 1, tmp_path), tmp_path)
    [error] = errors_of(outcomes)
    assert error.type == "BadTask"
    assert "called to evaluate the model, changes trained parameters: weight." in error.message
    assert list(outcomes[0].losses) == [1, 2]


@pytest.mark.parametrize(
    ("setup", "source", "named"),
    [
        ("RankDependentHook", "on_epoch_end", "weight"),
        ("RankDependentMask", "on_epoch_end", "mask"),
        ("RankDependentMode", "on_epoch_end", "the mode of the model"),
        ("LateInAfterStep", "after_step", "mask"),
    ],
)
def test_a_hook_that_changes_the_model_on_one_rank_only_is_refused_by_every_rank(
    setup: str, source: str, named: str, tmp_path: Path
) -> None:
    errors = errors_of(run_ranks(job_of(setup, 2, tmp_path), tmp_path))
    assert len(errors) == 2
    [message] = {error.message for error in errors}
    assert source in message
    assert f"left different values on the ranks: {named}." in message


@pytest.mark.parametrize("setup", ["Hook", "HalvesItsCopies"])
def test_what_all_ranks_change_alike_and_copies_may_be_changed(setup: str, tmp_path: Path) -> None:
    alone, *others = [
        train_to_end(job_of(setup, world_size, tmp_path), tmp_path).losses
        for world_size in (1, 2, 3)
    ]
    assert list(alone) == [1, 2, 3, 4]
    for losses in others:
        assert losses == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(
    ("setup", "reproducible"),
    [
        ("Task", BITWISE_WHERE_POSSIBLE),
        ("Undetermined", FLOAT_TOLERANCE),
        ("UndeterminedLater", FLOAT_TOLERANCE),
    ],
)
def test_a_run_promises_no_more_than_the_determinism_that_its_task_leaves(
    setup: str, reproducible: str, tmp_path: Path
) -> None:
    outcome = train_to_end(job_of(setup, 1, tmp_path), tmp_path)
    assert outcome.of_kind(EventKind.TRAINING_STARTED)[0]["reproducible"] == reproducible
