"""Evaluation: the same metrics at any world size whatever each batch has, tried before the first step, and survived."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.events import EventKind
from tests.integration.evaluated_trainees import NUM_HELD_OUT, NUM_STREAMED
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness_failures import errors_of
from tests.integration.test_exactness_precision import own_task_spec
from train_fn.evaluate import MIN_MICRO_BATCH

TRAINEES = "tests.integration.evaluated_trainees"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_metric_is_averaged_over_the_batches_that_have_it(world_size: int, tmp_path: Path) -> None:
    job = Job(make_run_dir(tmp_path), own_task_spec(0), world_size, setup=f"{TRAINEES}:uneven_metrics")
    metrics = train_to_end(job, tmp_path).of_kind(EventKind.EVALUATED)[-1]["metrics"]
    parts = [range(first, min(first + MIN_MICRO_BATCH, NUM_HELD_OUT)) for first in range(0, NUM_HELD_OUT, MIN_MICRO_BATCH)]

    def mean(*numbers: int) -> float:
        chosen = [index for number in numbers for index in parts[number]]
        return sum(chosen) / len(chosen)

    del metrics["val_loss"]
    assert list(metrics.items()) == [
        ("val_part_0", mean(0)),
        ("val_even", mean(0, 2)),
        ("val_all", mean(0, 1, 2, 3)),
        ("val_part_1", mean(1)),
        ("val_odd", mean(1, 3)),
        ("val_part_2", mean(2)),
        ("val_part_3", mean(3)),
        ("val_late", mean(3)),
    ], "in the order in which the names first occur"


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 1)])
def test_the_batch_that_is_tried_before_the_first_step_leaves_no_trace(world_size: int, num_workers: int, tmp_path: Path) -> None:
    found = []
    for name in ("disturbing", "disturbing_without_a_try"):
        job = Job(make_run_dir(tmp_path, name), own_task_spec(num_workers), world_size, setup=f"{TRAINEES}:{name}")
        outcome = train_to_end(job, tmp_path)
        found.append((outcome.losses, [data["metrics"] for data in outcome.of_kind(EventKind.EVALUATED)]))
    tried, plain = found
    assert tried == plain
    assert len(tried[0]) == 6 and tried[1][0]["val_index"] == (NUM_STREAMED - 1) / 2, "the evaluation had every sample"


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_error_of_the_evaluation_comes_before_the_first_step(world_size: int, tmp_path: Path) -> None:
    job = Job(make_run_dir(tmp_path), own_task_spec(0), world_size, setup=f"{TRAINEES}:broken_metrics")
    outcomes = run_ranks(job, tmp_path)
    errors = [error for error in errors_of(outcomes) if not error.collateral]
    assert {(error.type, error.message, error.step, error.phase) for error in errors} == {
        ("LookupError", "metrics are broken", 0, "evaluation")
    }
    assert "evaluated_trainees.py" in errors[0].traceback
    assert [outcome.losses for outcome in outcomes] == [{}] * world_size


@pytest.mark.parametrize("one_node", [True, False])
def test_an_evaluation_that_takes_all_ranks_along_costs_no_step(one_node: bool, tmp_path: Path) -> None:
    run_dir, spec = make_run_dir(tmp_path), own_task_spec(0)
    killed = run_ranks(Job(run_dir, spec, 2, one_node=one_node, setup=f"{TRAINEES}:deadly_metrics"), tmp_path)
    assert [outcome.exit_code for outcome in killed] == [-9, -9], "no rank is left to keep a state"
    again = train_to_end(Job(run_dir, spec, 2, attempt=2, one_node=one_node, setup=f"{TRAINEES}:uneven_metrics"), tmp_path)
    [restored] = again.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("snapshot", 3), "of the end of the epoch that was to be evaluated"
    assert [data["step"] for data in again.of_kind(EventKind.EVALUATED)] == [3, 6]
