"""``scaling.shares: by_speed``: ranks of unequal speed take unequal shares, and no bit changes."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from tests.integration.moving_buffers import SPEC as MOVING_SPEC
from tests.integration.ranks import Job, Outcome, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness_elastic import SETUPS, Bits, elastic
from tests.integration.test_exactness_failures import errors_of
from tests.integration.test_exactness_precision import TRAINEES, own_task_spec

SLOW = f"{SETUPS}:slow_second_rank"
SPEC = elastic(MOVING_SPEC, max_steps=30, loader={"num_workers": 1})
"""Loader processes have read ahead when shares change."""
KILLED_STEP = 22


def by_speed(spec: RunSpec) -> RunSpec:
    scaling = spec.scaling.model_copy(update={"shares": "by_speed"})
    return RunSpec.model_validate(spec.model_dump(mode="json") | {"scaling": scaling.model_dump()})


def plans_of(outcome: Outcome) -> dict[int, list[int]]:
    """The plans by the step from which on they hold."""
    return {
        data["step"]: data["micro_batches"] for data in outcome.of_kind(EventKind.SHARES_PLANNED)
    }


def test_unequal_shares_are_faster_and_change_no_bit(tmp_path: Path) -> None:
    """Against equal shares and one rank; and over the death of a rank, and a rank that joins."""
    alone_dir, equal_dir = make_run_dir(tmp_path, "run_1"), make_run_dir(tmp_path, "run_equal")
    alone = Bits(alone_dir, train_to_end(Job(alone_dir, SPEC, 1, setup=SLOW), tmp_path))
    equal = train_to_end(Job(equal_dir, SPEC, 2, setup=SLOW), tmp_path)
    assert plans_of(equal) == {}
    Bits(equal_dir, equal).require_same(alone)

    run_dir, spec = make_run_dir(tmp_path, "run_by_speed"), by_speed(SPEC)
    killed = Job(run_dir, spec, 2, killed=(1, KILLED_STEP), setup=SLOW)
    outcomes = run_ranks(killed, tmp_path)
    [error] = errors_of(outcomes[:1])
    assert error.snapshot_step == KILLED_STEP and outcomes[1].exit_code == -9
    plans = plans_of(outcomes[0])
    assert list(plans.values()) == [[4, 1]], "of five micro-batches, the slow rank had two"
    [planned_at] = plans
    assert planned_at < KILLED_STEP - 2
    step_s = {
        point["step"]: point["values"]["step_s"]
        for data in outcomes[0].of_kind(EventKind.METRICS)
        for point in data["points"]
    }
    before = median(took for step, took in step_s.items() if 2 < step <= planned_at)
    after = median(took for step, took in step_s.items() if step > planned_at + 1)
    assert after < 0.75 * before, (before, after)

    known = outcomes[0].remembered, {"micro_batch_s": 0.3}, {}
    job = Job(run_dir, spec, 3, attempt=2, setup=SLOW, remembered=known)
    resumed = train_to_end(job, tmp_path)
    assert plans_of(resumed)[KILLED_STEP] == [3, 1, 1], "before it has measured anything"
    Bits(run_dir, outcomes[0], resumed).require_same(alone)


def test_iterable_data_is_refused(tmp_path: Path) -> None:
    spec = by_speed(elastic(own_task_spec(0)))
    job = Job(make_run_dir(tmp_path), spec, 1, setup=f"{TRAINEES}:StreamedRegression")
    [error] = errors_of(run_ranks(job, tmp_path))
    assert error.type == "BadTask" and "scaling.shares is by_speed" in error.message
    assert "or set scaling.shares to equal" in error.message
