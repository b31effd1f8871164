"""A micro-batch of a single sample, and one of which nothing is left: said at the start, the same
in training and evaluation."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.one_rank import journal_of, one_rank
from train_fn.context import WorkerContext
from train_fn.loop import replica
from train_fn.loop.attempt import train
from train_fn.recovery.rank_error import StepFailed

pytestmark = pytest.mark.own_process

SHAPES = {"flat": (4,), "image": (2, 3, 3), "pooled": (2, 1, 1)}


class Normed:
    """A BatchNorm over ``shape``; samples of training are ``length``."""

    def __init__(self, length: int, shape: str = "flat", *, frozen: bool = False) -> None:
        self.length, self.shape, self.frozen = length, SHAPES[shape], frozen

    def build_model(self) -> nn.Module:
        norm = nn.BatchNorm1d(4) if len(self.shape) == 1 else nn.BatchNorm2d(2)
        if self.frozen:
            norm.eval()
        return nn.Sequential(norm, nn.Flatten(), nn.Linear(math.prod(self.shape), 1))

    def build_datasets(self) -> dict[str, Any]:
        x = torch.randn(self.length, *self.shape)
        return {"train": TensorDataset(x, x.flatten(1).sum(1)), "val": None}

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        x, y = batch
        return F.mse_loss(model(x)[:, 0], y, reduction="sum"), len(y)


def context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: Any, **train_spec: Any
) -> WorkerContext:
    monkeypatch.setattr(replica, "build_task", lambda spec: task)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    named = {
        "name": "image_classification",
        "model": {"name": "mini_resnet"},
        "data": {"name": "digits"},
    }
    settings = {
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "loader": {"num_workers": 0},
        **train_spec,
    }
    spec = RunSpec.model_validate(
        {"name": "small", "task": named, "train": settings, "scaling": {"use_gpu": False}}
    )
    return one_rank(spec, RunDir(open_storage(str(tmp_path / "storage")), "run_small"))


def refusal(ctx: WorkerContext) -> str:
    with pytest.raises(StepFailed) as caught:
        train(ctx)
    assert caught.value.error.type == "BadTask" and not journal_of(ctx).points
    return caught.value.error.message


@pytest.mark.parametrize(
    ("task", "sizes", "words"),
    [
        (
            Normed(25),
            {},
            (
                r"global batch 4 of an epoch has one: 25 samples in global batches of 8 .* of 4\. "
                r"Set "
                r"train\.global_batch_size to 11,"
            ),
        ),
        (
            Normed(24),
            {"global_batch_size": 9},
            (
                r"global batch 1 of an epoch has one: .*Set train\.micro_batch_size to 3, or use "
                r"GroupNorm"
            ),
        ),
        (
            Normed(24),
            {"micro_batch_size": 1},
            r"and a micro-batch has one: .*Set train\.micro_batch_size to 2, or",
        ),
        (Normed(25, "pooled"), {}, r"BatchNorm cannot train on a single sample"),
        (Normed(25), {"micro_batch_size": 1}, r"has one: .* Leave 1 of the samples out"),
    ],
)
def test_batch_norm_and_a_single_sample_are_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: Normed, sizes: dict[str, int], words: str
) -> None:
    assert re.search(words, said := refusal(context(tmp_path, monkeypatch, task, **sizes))), said


def test_the_remedy_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for length, size, micro in ((25, 8, 4), (24, 9, 4), (24, 8, 1), (321, 32, 8), (10, 3, 2)):
        said = refusal(
            context(
                tmp_path,
                monkeypatch,
                Normed(length),
                global_batch_size=size,
                micro_batch_size=micro,
            )
        )
        [(name, value)] = re.findall(r"Set train\.(\w+) to (\d+)", said)
        sizes = {"global_batch_size": size, "micro_batch_size": micro, name: int(value)}
        assert (
            train(
                context(tmp_path / f"{length}-{size}-{micro}", monkeypatch, Normed(length), **sizes)
            )
            is None
        )


@pytest.mark.parametrize(
    ("task", "sizes"),
    [
        (Normed(25, "image"), {}),  # several values a channel
        (Normed(25, frozen=True), {}),
        (Normed(24), {}),
        (Normed(25), {"max_steps": 3}),  # the short batch is never reached
    ],
)
def test_what_can_train_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: Normed, sizes: dict[str, int]
) -> None:
    ctx = context(tmp_path, monkeypatch, task, **sizes)
    assert train(ctx) is None
    assert all(map(math.isfinite, (point["values"]["loss"] for point in journal_of(ctx).points)))


class Spoilt:
    """A mean of numbers, of which those below 0 are bad; ``collate`` leaves them out, and gives
    None where nothing is left."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def build_model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def build_datasets(self) -> dict[str, Any]:
        return {"train": self.values, "val": self.values}

    def collate(self, samples: list[float]) -> torch.Tensor | None:
        good = [sample for sample in samples if sample >= 0]
        return torch.tensor(good) if good else None

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (model(torch.ones(1)) - batch).square().sum(), len(batch)

    def metrics(self, model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        return {"mean": (batch.sum(), len(batch))}


def test_a_collate_that_gives_none_is_left_out_of_training_and_evaluation_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """128 bad samples and more are whole batches of evaluation, too. Losses are those of the good
    ones alone."""
    values = [-1.0] * 128 + [float(number) for number in range(1, 33)] + [-1.0] * 96
    ctx = context(tmp_path, monkeypatch, Spoilt(values), global_batch_size=256, micro_batch_size=4)
    with caplog.at_level("WARNING"):
        assert train(ctx) is None
    good = torch.arange(1.0, 33.0)
    [point] = journal_of(ctx).points
    assert point["values"]["loss"] == pytest.approx(float(good.square().mean()), rel=1e-6)
    [evaluated] = journal_of(ctx).of_kind(EventKind.EVALUATED)
    assert evaluated["metrics"]["val_mean"] == pytest.approx(float(good.mean()), rel=1e-6)
    said = [
        record.message for record in caplog.records if "collate returned None" in record.message
    ]
    assert (
        "collate returned None for 1 batches of the validation set; they are left out" in said
        and len(said) > 2
    )
