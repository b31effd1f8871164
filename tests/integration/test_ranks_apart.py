"""One flipped bit on one rank is found by its peers, the step is not taken, and the run goes on
from a state from before, to the same end as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from everstep.wire.drills import DrillKind
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.run_control import Distrust
from tests.integration.ranks import Job, Outcome, make_run_dir, run_ranks, train_to_end
from tests.support.raw_specs import TASK
from train_fn.recovery.evidence import StepFailed

STEPS = 80
FLIPPED_AT = 70
SETUP = "tests.integration.trainees:regression"


def spec(lr: float = 0.01) -> RunSpec:
    """Three steps an epoch; no evaluation compares all weights before the last step."""
    return RunSpec.model_validate(
        {
            "name": "apart",
            "task": TASK,
            "optimizer": {"name": "sgd", "lr": lr, "momentum": 0.9, "weight_decay": 0.0},
            "train": {
                "epochs": 1000,
                "max_steps": STEPS,
                "eval_every_epochs": 1000,
                "global_batch_size": 30,
                "micro_batch_size": 10,
                "loader": {"num_workers": 0},
            },
            "checkpoint": {"every_steps": 5, "keep_latest": 1},
        }
    )


def proofs(*outcomes: Outcome) -> dict[int, dict[str, str]]:
    """The digests of each step; the newest report of a step counts."""
    return {
        point["step"]: point["proof"]
        for outcome in outcomes
        for data in outcome.of_kind(EventKind.METRICS)
        for point in data["points"]
    }


def errors(outcomes: list[Outcome]) -> list[StepFailed]:
    found = [outcome.error for outcome in outcomes]
    assert all(isinstance(error, StepFailed) for error in found), found
    return [error for error in found if isinstance(error, StepFailed)]


def test_the_rank_that_differs_is_named_and_the_run_ends_as_its_twin(tmp_path: Path) -> None:
    whole, hurt = make_run_dir(tmp_path, "run_whole"), make_run_dir(tmp_path, "run_hurt")
    twin = train_to_end(Job(whole, spec(), 3, setup=SETUP), tmp_path)
    # A pause commits a checkpoint for certain.
    begun = train_to_end(Job(hurt, spec(), 3, stopped=("pause", 4), setup=SETUP), tmp_path)
    flipped = (DrillKind.CORRUPT_GRADIENT, 1, FLIPPED_AT)
    broken = run_ranks(Job(hurt, spec(), 3, attempt=2, flipped=flipped, setup=SETUP), tmp_path)
    failed = errors(broken)
    kinds = [error.error.kind for error in failed]
    assert kinds == [ErrorKind.COLLECTIVE, ErrorKind.CORRUPTION, ErrorKind.COLLECTIVE]
    step, message = failed[1].error.step, failed[1].error.message
    assert step == FLIPPED_AT + 1, "found at the next step, which was not taken"
    assert "rank 1 differs from the others" in message
    assert f"the summed gradient of step {step}" in message
    trusted_step = step - 64
    assert hurt.distrusted() == (Distrust(1, 2, trusted_step),)
    assert all("may hold wrong bits" in str(error.snapshot_problem) for error in failed)

    again = train_to_end(Job(hurt, spec(), 3, attempt=3, setup=SETUP), tmp_path)
    [restored] = again.of_kind(EventKind.RESTORED)
    assert 0 < restored["step"] <= trusted_step, "retention keeps a state from before"
    assert all("may hold wrong bits" in each["problem"] for each in restored["rejected"])
    assert proofs(begun, broken[0], again) == proofs(twin)
    ends = [CheckpointStore(run_dir).lineage()[-1] for run_dir in (whole, hurt)]
    assert ends[0].chain == ends[1].chain == proofs(twin)[STEPS]["chain"]
    assert ends[0].files["model.pt"] == ends[1].files["model.pt"]


def test_two_ranks_that_differ_blame_none_and_every_part_of_the_weights_has_its_turn(
    tmp_path: Path,
) -> None:
    run_dir = make_run_dir(tmp_path)
    flipped = (DrillKind.CORRUPT_WEIGHTS, 1, 5)
    # So small steps leave every weight, so that the bit stays flipped.
    job = Job(run_dir, spec(lr=1e-20), 2, flipped=flipped, setup=f"{SETUP}_in_many_parts")
    failed = errors(run_ranks(job, tmp_path))
    assert [error.error.kind for error in failed] == [ErrorKind.CORRUPTION] * 2
    for error in failed:
        assert error.error.step is not None and 6 < error.error.step <= 6 + 64
        assert "no majority shows which are wrong in weights" in error.error.message
