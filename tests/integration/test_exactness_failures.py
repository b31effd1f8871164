"""What goes wrong on a rank ends the attempt in order, says what happened, and costs no committed
step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everstep.wire import ErrorKind
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from tests.integration.ranks import Job, Outcome, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness import (
    LAST_STEP,
    assert_same,
    final_state,
    make_spec,
    merged_losses,
)
from tests.integration.test_exactness_precision import TRAINEES, own_task_spec
from tests.support.storage_places import record_restored
from train_fn.node.node_dir import shared_memory_root, states_on_disk
from train_fn.recovery.evidence import RankError, StepFailed, describe_error


def errors_of(outcomes: list[Outcome]) -> list[RankError]:
    assert all(isinstance(outcome.error, StepFailed) for outcome in outcomes), outcomes
    return [
        describe_error(outcome.error, rank)
        for rank, outcome in enumerate(outcomes)
        if outcome.error
    ]


def test_a_loss_that_is_not_finite_stops_every_rank_before_the_step(tmp_path: Path) -> None:
    outcomes = run_ranks(
        Job(make_run_dir(tmp_path), own_task_spec(0), 2, setup=f"{TRAINEES}:regression_with_a_nan"),
        tmp_path,
    )
    errors = errors_of(outcomes)
    assert [error.type for error in errors] == ["NonFiniteLoss", "NonFiniteLoss"]
    assert {error.kind for error in errors} == {ErrorKind.USER}
    [step] = {error.step for error in errors}
    found = re.search(r"the loss of step (\d+) is nan on rank ([01])", errors[0].message)
    assert found is not None
    assert step is not None
    assert int(found[1]) == step + 1
    assert errors[0].message == errors[1].message
    assert max(outcomes[0].losses, default=0) == step  # the step itself was not taken, nor reported


def test_a_data_set_that_raises_is_told_from_its_consequences(tmp_path: Path) -> None:
    run_dir, setup = make_run_dir(tmp_path), f"{TRAINEES}:regression_with_a_broken_sample"
    errors = errors_of(run_ranks(Job(run_dir, own_task_spec(0), 3, setup=setup), tmp_path))
    [culprit] = [error for error in errors if not error.collateral]
    assert (culprit.type, culprit.message, culprit.phase) == (
        "LookupError",
        "sample 41 is broken",
        "data",
    )
    assert "trainees.py" in culprit.traceback
    assert all(error.kind is ErrorKind.COLLECTIVE for error in errors if error is not culprit)


def test_ranks_whose_attempt_is_given_up_leave_their_states_although_all_live(
    tmp_path: Path,
) -> None:
    """As where one host is cut off from the head alone: no collective fails by itself."""
    whole, broken = make_run_dir(tmp_path, "run_whole"), make_run_dir(tmp_path, "run_broken")
    spec = make_spec()
    reference = train_to_end(Job(whole, spec, 3), tmp_path)
    left = run_ranks(Job(broken, spec, 3, abandon=(1, 11)), tmp_path)
    errors = errors_of(left)
    assert [error.kind for error in errors] == [ErrorKind.COLLECTIVE] * 3
    assert [error.snapshot_step for error in errors] == [11] * 3
    assert errors[1].type == "PeersGone"
    resumed = train_to_end(Job(broken, spec, 3, attempt=2), tmp_path)
    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("snapshot", 11)
    assert merged_losses(left[0], resumed) == reference.losses
    assert_same(final_state(whole), final_state(broken))


def test_data_that_is_not_the_same_on_all_nodes_is_refused_by_every_rank(tmp_path: Path) -> None:
    run_dir, setup = make_run_dir(tmp_path), f"{TRAINEES}:ShorterOnSecondRank"
    errors = errors_of(run_ranks(Job(run_dir, own_task_spec(0), 2, setup=setup), tmp_path))
    assert {(error.type, error.kind) for error in errors} == {("DataChanged", ErrorKind.USER)}
    message = (
        "the training data differs between nodes (rank 0: Lines/90, rank 1: Lines/89); make it "
        "the same on all"
    )
    assert {error.message for error in errors} == {message}


@pytest.mark.core
def test_a_checkpoint_that_was_tampered_with_is_rejected_and_the_one_before_is_taken(
    tmp_path: Path,
) -> None:
    run_dir, spec = make_run_dir(tmp_path), make_spec()
    store = CheckpointStore(run_dir)
    train_to_end(Job(run_dir, spec, 1, stopped=("pause", 13)), tmp_path)
    names = [manifest.name for manifest in store.list()]
    assert names == ["step-000000010.s001.a001", "step-000000014.s001.a001"]
    model = Path(store.path(names[-1])) / "model.pt"
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 1
    model.write_bytes(data)
    resumed = train_to_end(Job(run_dir, spec, 2, submission=2), tmp_path)
    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert (restored["step"], restored["checkpoint"]) == (10, names[0])
    [rejected] = restored["rejected"]
    assert rejected["name"] == names[1]
    assert "model.pt" in rejected["problem"]
    assert max(resumed.losses) == LAST_STEP


def test_the_last_checkpoint_is_told_though_the_rank_died_once_it_was_committed(
    tmp_path: Path,
) -> None:
    run_dir, spec = make_run_dir(tmp_path), make_spec()
    store = CheckpointStore(run_dir)
    run_ranks(Job(run_dir, spec, 2, killed_telling=LAST_STEP), tmp_path)
    committed = store.list()
    assert committed[-1].step == LAST_STEP
    again = train_to_end(Job(run_dir, spec, 2, attempt=2), tmp_path)
    [restored] = again.of_kind(EventKind.RESTORED)
    assert restored["step"] == LAST_STEP, "nothing is left to do but to tell"
    reported = [
        (data["step"], data["digest"]) for data in again.of_kind(EventKind.CHECKPOINT_COMMITTED)
    ]
    assert reported == [(manifest.step, manifest.digest) for manifest in committed], (
        "none of these ranks' journals outlives them"
    )
    assert store.list() == committed


def test_a_state_that_shared_memory_is_too_small_for_is_on_disk(tmp_path: Path) -> None:
    run_dir, spec = make_run_dir(tmp_path, "run_small"), make_spec()
    setup = f"{TRAINEES}:too_little_shared_memory"
    outcomes = run_ranks(
        Job(run_dir, spec, 2, killed=(1, 13), killed_after=10, setup=setup), tmp_path
    )
    assert isinstance(outcomes[0].error, StepFailed)
    assert outcomes[0].error.error.snapshot_step == 13
    assert outcomes[0].error.snapshot_problem is None
    resumed = train_to_end(Job(run_dir, spec, 2, attempt=2), tmp_path)
    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"], restored["rejected"]) == ("snapshot", 13, [])
    assert not states_on_disk(run_dir.run_id).exists(), "the end of the run removes it"
    assert not (shared_memory_root() / run_dir.run_id).exists()


@pytest.mark.parametrize("went_on_from", [None, 10])
def test_a_killed_submissions_snapshot_counts_unless_another_went_on_without_it(
    went_on_from: int | None, tmp_path: Path
) -> None:
    run_dir, spec = make_run_dir(tmp_path, "run_fenced"), make_spec()
    outcomes = run_ranks(Job(run_dir, spec, 2, killed=(1, 13), killed_after=10), tmp_path)
    assert isinstance(outcomes[0].error, StepFailed)
    assert outcomes[0].error.error.snapshot_step == 13
    record_restored(run_dir, 1, 0, "fresh")
    if went_on_from is not None:
        record_restored(run_dir, 2, went_on_from, "checkpoint")
    resumed = train_to_end(Job(run_dir, spec, 2, attempt=5, submission=3), tmp_path)
    [restored] = resumed.of_kind(EventKind.RESTORED)
    expected = ("snapshot", 13, 0) if went_on_from is None else ("checkpoint", 10, 1)
    assert (restored["source"], restored["step"], len(restored["rejected"])) == expected


def test_a_replaced_submission_takes_no_step(tmp_path: Path) -> None:
    run_dir, spec = make_run_dir(tmp_path, "run_replaced"), make_spec()
    record_restored(run_dir, 2, 0, "fresh")
    outcomes = run_ranks(Job(run_dir, spec, 2), tmp_path)
    errors = [
        describe_error(outcome.error, rank)
        for rank, outcome in enumerate(outcomes)
        if outcome.error
    ]
    assert [error.collateral for error in errors] == [True, True]
    assert "submission 2 of run" in errors[0].message
    assert [outcome.losses for outcome in outcomes] == [{}, {}]


def test_a_cancel_commits_a_checkpoint_at_an_agreed_step(tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path)
    outcomes = run_ranks(Job(run_dir, make_spec(), 3, stopped=("cancel", 4)), tmp_path)
    assert [outcome.stop for outcome in outcomes] == ["cancel"] * 3
    assert max(outcomes[0].losses) == 5
    assert [manifest.step for manifest in CheckpointStore(run_dir).list()] == [5]
    assert [outcome.reported for outcome in outcomes] == [["step-000000005.s001.a001"]] * 3
