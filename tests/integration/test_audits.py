"""``train.audit_fraction``: ranks compute micro-batches of each other again, name who computes
wrongly before anyone takes the step, and leave no trace where all is well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from everstep.wire.drills import DrillKind
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from tests.integration.audit_setups import FAULTY_FROM, FAULTY_RANK
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness_alone import make_text_spec
from tests.integration.test_exactness_failures import errors_of
from tests.support.raw_specs import TASK
from tests.support.two_groups import only_in_chaos

SETUPS = "tests.integration.audit_setups"
MOVING = f"{SETUPS}:moving"
STEPS, FLIPPED_AT = 9, 4


def spec(fraction: float = 1.0, exactness: str = "world_size", precision: str = "fp32") -> RunSpec:
    """Four micro-batches of ten samples a step; one in the third step of each epoch."""
    return RunSpec.model_validate(
        {
            "name": "audited",
            "task": TASK,
            "optimizer": {"name": "adamw", "lr": 0.01},
            "train": {
                "epochs": 3,
                "max_steps": STEPS,
                "global_batch_size": 40,
                "micro_batch_size": 10,
                "exactness": exactness,
                "precision": precision,
                "audit_fraction": fraction,
                "loader": {"num_workers": 0},
            },
            "scaling": {"max_workers": 3},
            "checkpoint": {"every_steps": 100},
        }
    )


def end_of(run_dir: RunDir) -> tuple[Any, ...]:
    newest = CheckpointStore(run_dir).lineage()[-1]
    return newest.step, newest.chain, newest.files["model.pt"], newest.sample_digest


def twin_of(job: Job, tmp_path: Path) -> tuple[Any, ...]:
    """The end of a run that nobody audits or disturbs."""
    run_dir = make_run_dir(tmp_path, "run_twin")
    plain = spec(0.0, job.spec.train.exactness, job.spec.train.precision)
    train_to_end(Job(run_dir, plain, job.world_size, setup=MOVING), tmp_path)
    return end_of(run_dir)


@pytest.mark.parametrize(
    ("exactness", "precision"),
    [
        ("world_size", "fp32"),
        ("elastic", "fp32"),
        *only_in_chaos(("world_size", "bf16"), ("world_size", "fp16"), ("elastic", "bf16")),
    ],
)
def test_one_wrong_bit_in_a_ranks_own_gradient_is_found_before_the_step(
    exactness: str, precision: str, tmp_path: Path
) -> None:
    flipped = (DrillKind.CORRUPT_GRADIENT, 1, FLIPPED_AT)
    run_dir = make_run_dir(tmp_path)
    audited = spec(exactness=exactness, precision=precision)
    job = Job(run_dir, audited, 3, flipped=flipped, setup=MOVING)
    errors = errors_of(run_ranks(job, tmp_path))
    kinds = [error.kind for error in errors]
    assert kinds == [ErrorKind.COLLECTIVE, ErrorKind.CORRUPTION, ErrorKind.COLLECTIVE]
    assert "rank 1 computed wrongly: its gradient of micro-batch" in errors[1].message
    assert [error.step for error in errors] == [FLIPPED_AT] * 3
    assert [error.snapshot_step for error in errors] == [FLIPPED_AT, None, FLIPPED_AT]
    assert run_dir.distrusted() == ()

    world_size = 2 if exactness == "elastic" else 3
    again = Job(run_dir, job.spec, world_size, attempt=2, setup=MOVING)
    [restored] = train_to_end(again, tmp_path).of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("snapshot", FLIPPED_AT), "0 steps lost"
    assert end_of(run_dir) == twin_of(job, tmp_path), "audits leave no trace"


@pytest.mark.chaos
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_language_model_is_audited_without_a_trace(precision: str, tmp_path: Path) -> None:
    raw = make_text_spec(tmp_path).model_dump(mode="json")
    ends = []
    for fraction in (0.0, 1.0):
        train = {**raw["train"], "audit_fraction": fraction, "precision": precision}
        run_dir = make_run_dir(tmp_path, f"run_{len(ends)}")
        train_to_end(Job(run_dir, RunSpec.model_validate({**raw, "train": train}), 2), tmp_path)
        ends.append(end_of(run_dir))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("world_size", "kept"), [(1, [FLIPPED_AT]), (2, [FLIPPED_AT, None])])
def test_a_fault_that_goes_away_is_found_with_two_ranks_and_with_one(
    world_size: int, kept: list[int | None], tmp_path: Path
) -> None:
    faulty = world_size - 1
    flipped = (DrillKind.CORRUPT_GRADIENT, faulty, FLIPPED_AT)
    job = Job(make_run_dir(tmp_path), spec(), world_size, flipped=flipped, setup=MOVING)
    errors = errors_of(run_ranks(job, tmp_path))
    assert errors[faulty].kind is ErrorKind.CORRUPTION
    assert f"rank {faulty} computed wrongly" in errors[faulty].message
    assert [error.snapshot_step for error in errors] == kept


def test_a_fault_that_stays_is_decided_by_a_third_rank(tmp_path: Path) -> None:
    errors = errors_of(
        run_ranks(Job(make_run_dir(tmp_path), spec(), 3, setup=f"{SETUPS}:faulty_rank"), tmp_path)
    )
    blamed = [rank for rank, error in enumerate(errors) if error.kind is ErrorKind.CORRUPTION]
    assert blamed == [FAULTY_RANK]
    assert {error.step for error in errors} == {FAULTY_FROM}


def test_a_fault_that_stays_cannot_be_decided_by_two_ranks(tmp_path: Path) -> None:
    job = Job(make_run_dir(tmp_path), spec(), 2, setup=f"{SETUPS}:faulty_rank")
    errors = errors_of(run_ranks(job, tmp_path))
    assert [error.kind for error in errors] == [ErrorKind.CORRUPTION] * 2
    assert all("cannot decide which are wrong" in error.message for error in errors)
    assert [error.snapshot_step for error in errors] == [FAULTY_FROM] * 2


def test_a_wrong_bit_of_the_sum_is_found_before_the_step(tmp_path: Path) -> None:
    flipped = (DrillKind.CORRUPT_GRADIENT, 2, FLIPPED_AT)
    job = Job(make_run_dir(tmp_path), spec(), 3, flipped=flipped, setup=f"{SETUPS}:flipped_sums")
    errors = errors_of(run_ranks(job, tmp_path))
    assert "rank 2 computed wrongly: the summed gradient differs" in errors[2].message
    assert [error.snapshot_step for error in errors] == [FLIPPED_AT, FLIPPED_AT, None]


@pytest.mark.parametrize("world_size", [2, *only_in_chaos(1)])
def test_wrong_weights_are_told_from_a_wrong_result(world_size: int, tmp_path: Path) -> None:
    """The state itself is wrong then, and is not kept."""
    faulty = world_size - 1
    flipped = (DrillKind.CORRUPT_WEIGHTS, faulty, FLIPPED_AT)
    run_dir = make_run_dir(tmp_path)
    job = Job(run_dir, spec(), world_size, flipped=flipped, setup=MOVING)
    errors = errors_of(run_ranks(job, tmp_path))
    assert errors[faulty].kind is ErrorKind.CORRUPTION and errors[faulty].type == "RanksApart"
    assert f"rank {faulty} differs" in errors[faulty].message
    assert [error.snapshot_step for error in errors] == [None] * world_size
    assert len(run_dir.distrusted()) == 1


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (f"{SETUPS}:Counting", "Counting.calls"),
        (f"{SETUPS}:Drawing", "its loss and its gradient differ when one micro-batch is computed"),
        ("tests.integration.trainees:RegressionOverRanks", "exchanges in its forward pass"),
        ("tests.integration.trainees:StreamedRegression", "iterable data"),
    ],
)
def test_what_another_rank_cannot_repeat_is_refused(setup: str, said: str, tmp_path: Path) -> None:
    errors = errors_of(run_ranks(Job(make_run_dir(tmp_path), spec(), 2, setup=setup), tmp_path))
    assert any(error.type == "BadTask" and said in error.message for error in errors), errors
    assert all("train.audit_fraction to 0" in e.message for e in errors if e.type == "BadTask")
