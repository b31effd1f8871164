"""Micro-batches of one sample, and of none, among several ranks: all ranks answer alike."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from tests.integration.ranks import Job, make_run_dir, train_to_end
from tests.integration.test_exactness import make_spec
from tests.support.small_batches import Spoilt
from tests.support.two_groups import only_in_chaos
from train_fn.loop import build
from train_fn.samples.sampler import Sampler

HERE = "tests.integration.test_exactness_small_batches"
LR = 0.05
NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 128, 32, 4
HELD_OUT = [-1.0] * 128 + [float(number) for number in range(1, 9)] + [-1.0] * 90
"""The first of two micro-batches of evaluation has no good sample."""
GOOD = (0, 2, 3)
"""Places in a global batch that have a good sample: all of them in its first micro-batch, so that
the last micro-batch of every share is left out, and all of the others' shares."""


def global_batches() -> list[list[int]]:
    sampler = Sampler(NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH, make_spec().train.seed)
    return [
        [int(index) for index in sampler.global_batch(0, k)] for k in range(sampler.steps_per_epoch)
    ]


def values() -> list[float]:
    numbers = [-1.0] * NUM_SAMPLES
    for batch in global_batches():
        for place in GOOD:
            numbers[batch[place]] = 1.0 + batch[place] / NUM_SAMPLES
    return numbers


def spoilt() -> None:
    build.build_task = lambda spec: Spoilt(values(), HELD_OUT)


def small_spec(global_batch: int, micro_batch: int, **changes: Any) -> RunSpec:
    raw = make_spec().model_dump(mode="json")
    train = {
        "global_batch_size": global_batch,
        "micro_batch_size": micro_batch,
        "loader": {"num_workers": 0},
        **changes,
    }
    optimizer = {"name": "sgd", "lr": LR, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    return RunSpec.model_validate(
        raw | {"train": train, "optimizer": optimizer, "schedule": {"name": "constant"}}
    )


@pytest.mark.parametrize("world_size", [2, *only_in_chaos(1, 3)])
def test_batches_that_collate_leaves_out_count_on_no_rank(world_size: int, tmp_path: Path) -> None:
    """As in one loop of plain torch over the good samples alone."""
    run_dir = make_run_dir(tmp_path)
    spec = small_spec(GLOBAL_BATCH, MICRO_BATCH, epochs=1)
    outcome = train_to_end(Job(run_dir, spec, world_size, setup=f"{HERE}:spoilt"), tmp_path)

    numbers, weight, losses = values(), torch.zeros((), requires_grad=True), {}
    optimizer = torch.optim.SGD([weight], lr=LR)
    for step, batch in enumerate(global_batches()):
        good = torch.tensor([numbers[batch[place]] for place in GOOD])
        optimizer.zero_grad()
        loss = (weight - good).square().mean()
        loss.backward()
        optimizer.step()
        losses[step + 1] = float(loss.detach())
    assert outcome.losses == pytest.approx(losses, rel=1e-5)
    store = CheckpointStore(run_dir)
    saved = torch.load(io.BytesIO(store.read_file(store.list()[-1].name, "model.pt")))
    assert float(saved["weight"]) == pytest.approx(float(weight.detach()), rel=1e-5)
    [evaluated] = outcome.of_kind(EventKind.EVALUATED)
    assert evaluated["metrics"]["val_mean"] == pytest.approx(4.5, rel=1e-6)
    [epoch] = outcome.of_kind(EventKind.EPOCH_COMPLETED)
    assert (epoch["used_once"], epoch["missing"]) == (NUM_SAMPLES, 0)
