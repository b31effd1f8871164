"""Iterable data over failures: the same global batches, whoever dies and at any world size."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness import assert_same, merged_losses
from tests.integration.test_exactness_precision import TRAINEES, own_task_spec

SETUP = f"{TRAINEES}:StreamedRegression"
LAST_STEP = 30


def test_a_killed_rank_costs_no_sample_at_this_or_another_world_size(tmp_path: Path) -> None:
    raw = own_task_spec(0).model_dump(mode="json")
    spec = RunSpec.model_validate(
        raw | {"scaling": {"max_workers": 2}, "train": raw["train"] | {"epochs": 10}}
    )
    whole, same, fewer = (
        make_run_dir(tmp_path, name) for name in ("run_whole", "run_same", "run_fewer")
    )
    reference = train_to_end(Job(whole, spec, 2, setup=SETUP), tmp_path)
    assert (
        "from the state that the data set gives"
        in reference.of_kind(EventKind.TRAINING_STARTED)[0]["guarantee"]
    )

    broken = run_ranks(Job(same, spec, 2, killed=(1, 25), setup=SETUP), tmp_path)[0]
    resumed = train_to_end(Job(same, spec, 2, attempt=2, setup=SETUP), tmp_path)
    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("snapshot", 25)
    assert merged_losses(broken, resumed) == reference.losses
    assert_same(final_weights(whole), final_weights(same))

    run_ranks(Job(fewer, spec, 2, killed=(1, 25), setup=SETUP), tmp_path)
    shrunk = train_to_end(Job(fewer, spec, 1, attempt=2, setup=SETUP), tmp_path)
    assert shrunk.of_kind(EventKind.RESTORED)[0]["step"] == 25 and max(shrunk.losses) == LAST_STEP
    for step, loss in shrunk.losses.items():
        assert loss == pytest.approx(reference.losses[step], rel=1e-5)
    digests = [
        outcome.of_kind(EventKind.EPOCH_COMPLETED)[-1]["digest"]
        for outcome in (reference, resumed, shrunk)
    ]
    assert len(set(digests)) == 1
    assert shrunk.of_kind(EventKind.EPOCH_COMPLETED)[-1]["used_once"] == 90
    scores = [
        outcome.of_kind(EventKind.EVALUATED)[-1]["metrics"]["val_loss"]
        for outcome in (reference, shrunk)
    ]
    assert scores[1] == pytest.approx(scores[0], rel=1e-4)


def final_weights(run_dir: RunDir) -> dict[str, torch.Tensor]:
    store = CheckpointStore(run_dir)
    newest = store.list()[-1]
    assert newest.step == LAST_STEP
    weights: dict[str, torch.Tensor] = torch.load(
        io.BytesIO(store.read_file(newest.name, "model.pt"))
    )
    return weights
