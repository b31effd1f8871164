"""A micro-batch of a single sample, and one of which nothing is left: said at the start, the same
in training and evaluation."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.one_rank import journal_of, one_rank
from tests.support.raw_specs import TASK
from tests.support.small_batches import Normed, Spoilt
from train_fn.context import WorkerContext
from train_fn.loop import build
from train_fn.loop.attempt import train
from train_fn.recovery.evidence import StepFailed

pytestmark = pytest.mark.own_process


def context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: Any, **train_spec: Any
) -> WorkerContext:
    monkeypatch.setattr(build, "build_task", lambda spec: task)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    settings = {
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "loader": {"num_workers": 0},
        **train_spec,
    }
    spec = RunSpec.model_validate(
        {"name": "small", "task": TASK, "train": settings, "scaling": {"use_gpu": False}}
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
