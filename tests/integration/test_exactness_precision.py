"""Exactness where arithmetic or weights are not the plain case: half precision, skipped steps,
tokens, users' own data."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness import (
    LAST_STEP,
    assert_same,
    final_state,
    make_spec,
    merged_losses,
)
from train_fn.state.optim import unpacked

TRAINEES = "tests.integration.trainees"


def test_a_step_that_the_scaler_skips_has_consumed_its_samples(tmp_path: Path) -> None:
    whole, broken = make_run_dir(tmp_path, "run_whole"), make_run_dir(tmp_path, "run_broken")
    spec, setup = make_spec(precision="fp16"), f"{TRAINEES}:overflowing_scaler"
    reference = train_to_end(Job(whole, spec, 2, setup=setup), tmp_path)
    state = final_state(whole)
    taken = {
        int(values["step"])
        for values in unpacked(state["train_state.pt"]["optimizer"])["state"].values()
    }
    [num_taken] = taken
    assert 0 < num_taken < LAST_STEP  # some steps were skipped, not all
    assert all(
        epoch["used_once"] == 1437 and epoch["missing"] == 0
        for epoch in reference.of_kind(EventKind.EPOCH_COMPLETED)
    )

    first = run_ranks(Job(broken, spec, 2, setup=setup, killed=(1, 12)), tmp_path)[0]
    second = train_to_end(Job(broken, spec, 2, setup=setup, attempt=2), tmp_path)
    assert second.of_kind(EventKind.RESTORED)[0]["source"] == "snapshot"
    assert merged_losses(first, second) == reference.losses
    assert_same(state, final_state(broken))


def test_a_model_that_exchanges_in_forward_makes_equal_passes(tmp_path: Path) -> None:
    """Three ranks share five, or two, micro-batches: those with less run passes over no samples, or
    all would wait for ever."""
    job = Job(make_run_dir(tmp_path), own_task_spec(0), 3, setup=f"{TRAINEES}:RegressionOverRanks")
    outcome = train_to_end(job, tmp_path)
    assert [epoch["used_once"] for epoch in outcome.of_kind(EventKind.EPOCH_COMPLETED)] == [90, 90]
    assert outcome.losses[6] < outcome.losses[1]


def own_task_spec(num_workers: int, micro_batch_size: int = 8) -> RunSpec:
    raw = make_spec().model_dump(mode="json")
    train = raw["train"] | {
        "global_batch_size": 40,
        "micro_batch_size": micro_batch_size,
        "loader": {"num_workers": num_workers},
    }
    return RunSpec.model_validate(
        raw | {"train": train | {"ema_decay": None}, "schedule": {"name": "constant"}}
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_weights_that_are_not_samples_and_data_of_ones_own(
    num_workers: int, tmp_path: Path
) -> None:
    """Tokens are shared out unevenly, the last global batch has 10 of 40 samples, and a third rank
    then has none."""
    spec, setup = own_task_spec(num_workers), f"{TRAINEES}:regression"
    alone = train_to_end(Job(make_run_dir(tmp_path, "run_1"), spec, 1, setup=setup), tmp_path)
    three = train_to_end(Job(make_run_dir(tmp_path, "run_3"), spec, 3, setup=setup), tmp_path)
    assert sorted(alone.losses) == list(range(1, 7))
    for step, loss in alone.losses.items():
        assert three.losses[step] == pytest.approx(loss, rel=1e-5)
    [first, second] = three.of_kind(EventKind.EPOCH_COMPLETED)
    assert (first["samples"], first["used_once"], first["missing"], first["duplicates"]) == (
        90,
        90,
        0,
        0,
    )
    assert (
        first["digest"] == alone.of_kind(EventKind.EPOCH_COMPLETED)[0]["digest"] != second["digest"]
    )
    evaluations = [
        outcome.of_kind(EventKind.EVALUATED)[-1]["metrics"]["val_loss"]
        for outcome in (alone, three)
    ]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-5)


def test_the_update_is_by_the_weighted_mean_whatever_weights_are_counted_in(tmp_path: Path) -> None:
    """Global batches of one micro-batch, whose mean the task can tell itself; the last one of an
    epoch is short. Plain SGD without clipping: nothing else evens a wrong scale out."""
    raw = own_task_spec(0, micro_batch_size=40).model_dump(mode="json")
    spec = RunSpec.model_validate(
        raw
        | {
            "optimizer": {"name": "sgd", "lr": 0.05},
            "train": raw["train"] | {"grad_clip_norm": None, "epochs": 4},
        }
    )
    tokens, sixteenths, means = (
        train_to_end(
            Job(make_run_dir(tmp_path, f"run_{name}"), spec, 1, setup=f"{TRAINEES}:{name}"),
            tmp_path,
        ).losses
        for name in ("regression", "regression_in_sixteenths", "RegressionByMeans")
    )
    assert tokens == sixteenths and len(tokens) == 12
    for step, loss in means.items():
        assert tokens[step] == pytest.approx(loss, rel=1e-4)
