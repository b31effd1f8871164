"""Evaluation: the same metrics at any world size whatever each batch has, tried before the first
step, and survived."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from tests.integration.evaluated_trainees import HOOK_S, NUM_HELD_OUT, NUM_STREAMED, SECOND_RANK_S
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness_failures import errors_of
from tests.integration.test_exactness_precision import own_task_spec
from tests.support.two_groups import only_in_chaos
from train_fn.loop.evaluate import MIN_MICRO_BATCH
from train_fn.recovery.hang import HangWatch, ProgressTracker
from train_fn.recovery.settings import RecoverySettings

TRAINEES = "tests.integration.evaluated_trainees"


@pytest.mark.parametrize("world_size", [2, *only_in_chaos(1, 3)])
def test_a_metric_is_averaged_over_the_batches_that_have_it(
    world_size: int, tmp_path: Path
) -> None:
    job = Job(
        make_run_dir(tmp_path), own_task_spec(0), world_size, setup=f"{TRAINEES}:UnevenMetrics"
    )
    metrics = train_to_end(job, tmp_path).of_kind(EventKind.EVALUATED)[-1]["metrics"]
    parts = [
        range(first, min(first + MIN_MICRO_BATCH, NUM_HELD_OUT))
        for first in range(0, NUM_HELD_OUT, MIN_MICRO_BATCH)
    ]

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


@pytest.mark.parametrize(("world_size", "num_workers"), [(2, 1), *only_in_chaos((1, 0))])
def test_the_batch_that_is_tried_before_the_first_step_leaves_no_trace(
    world_size: int, num_workers: int, tmp_path: Path
) -> None:
    found = []
    for name in ("disturbing", "disturbing_without_a_try"):
        job = Job(
            make_run_dir(tmp_path, name),
            own_task_spec(num_workers),
            world_size,
            setup=f"{TRAINEES}:{name}",
        )
        outcome = train_to_end(job, tmp_path)
        found.append(
            (outcome.losses, [data["metrics"] for data in outcome.of_kind(EventKind.EVALUATED)])
        )
    tried, plain = found
    assert tried == plain
    assert len(tried[0]) == 6 and tried[1][0]["val_index"] == (NUM_STREAMED - 1) / 2, (
        "the evaluation had every sample"
    )


@pytest.mark.parametrize("world_size", [2, *only_in_chaos(1)])
def test_an_error_of_the_evaluation_comes_before_the_first_step(
    world_size: int, tmp_path: Path
) -> None:
    job = Job(
        make_run_dir(tmp_path), own_task_spec(0), world_size, setup=f"{TRAINEES}:BrokenMetrics"
    )
    outcomes = run_ranks(job, tmp_path)
    errors = [error for error in errors_of(outcomes) if not error.collateral]
    assert {(error.type, error.message, error.step, error.phase) for error in errors} == {
        ("LookupError", "metrics are broken", 0, "evaluation")
    }
    assert "evaluated_trainees.py" in errors[0].traceback
    assert [outcome.losses for outcome in outcomes] == [{}] * world_size


@pytest.mark.parametrize("one_node", [True, *only_in_chaos(False)])
def test_an_evaluation_that_takes_all_ranks_along_costs_no_step(
    one_node: bool, tmp_path: Path
) -> None:
    run_dir, spec = make_run_dir(tmp_path), own_task_spec(0)
    killed = run_ranks(
        Job(run_dir, spec, 2, one_node=one_node, setup=f"{TRAINEES}:deadly_metrics"), tmp_path
    )
    assert [outcome.exit_code for outcome in killed] == [-9, -9], "no rank is left to keep a state"
    again = train_to_end(
        Job(run_dir, spec, 2, attempt=2, one_node=one_node, setup=f"{TRAINEES}:UnevenMetrics"),
        tmp_path,
    )
    [restored] = again.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("snapshot", 3), (
        "of the end of the epoch that was to be evaluated"
    )
    assert [data["step"] for data in again.of_kind(EventKind.EVALUATED)] == [3, 6]


def test_a_slow_hook_at_an_epoch_s_end_has_the_time_of_an_evaluation(tmp_path: Path) -> None:
    outcome = train_to_end(
        Job(make_run_dir(tmp_path), own_task_spec(0), 2, setup=f"{TRAINEES}:slow_hook"), tmp_path
    )
    settings, tracker = RecoverySettings(), ProgressTracker()
    watch, limits = HangWatch(settings, None), []
    tracker.note(EventKind.ATTEMPT_STARTED, 1, {})
    for kind, data in outcome.events:
        tracker.note(kind, 1, data)
        if kind in {EventKind.EVALUATED, EventKind.EPOCH_HOOK_DONE, EventKind.METRICS}:
            limits.append((kind, watch.limit_s(tracker.progress())))
    assert [limit for limit in limits if limit[0] is EventKind.EVALUATED] == [
        (EventKind.EVALUATED, 3600.0)
    ] * 2
    done = [limit for limit in limits if limit[0] is EventKind.EPOCH_HOOK_DONE]
    assert done == [(EventKind.EPOCH_HOOK_DONE, 60.0), (EventKind.EPOCH_HOOK_DONE, 3600.0)], (
        "the second precedes the last save"
    )
    hooks = outcome.of_kind(EventKind.EPOCH_HOOK_DONE)
    assert [data["epoch"] for data in hooks] == [0, 1]
    assert all(data["seconds"] >= SECOND_RANK_S for data in hooks), (
        "rank 0 waits until the hook has returned on all ranks"
    )
    points = [point for data in outcome.of_kind(EventKind.METRICS) for point in data["points"]]
    assert len(points) == 6 and all(point["values"]["step_s"] < HOOK_S / 2 for point in points), (
        "it is no step's time"
    )
