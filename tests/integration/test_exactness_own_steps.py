"""A task that steps two optimizers itself: what plain torch does on one rank, at every world size,
over kills at any place of a step, checkpoints and stops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everstep.wire.events import EventKind
from tests.integration.own_steps_task import NUM_STEPS, SPEC, plain_run, weights_of
from tests.integration.ranks import Job, Outcome, make_run_dir, run_ranks, train_to_end
from tests.support.silent_backend import SilentOptions
from tests.support.two_groups import only_in_chaos
from train_fn.recovery.evidence import StepFailed

MODULE = "tests.integration.own_steps_task"
GAN, QUIET = f"{MODULE}:gan", f"{MODULE}:quiet"
UPDATES = 3
"""Optimizer steps in each step of the run."""


def points_of(*outcomes: Outcome) -> dict[int, tuple[float, float]]:
    return {
        point["step"]: (point["values"]["loss"], point["values"]["fooled"])
        for outcome in outcomes
        for data in outcome.of_kind(EventKind.METRICS)
        for point in data["points"]
    }


@pytest.mark.parametrize("world_size", [2, *only_in_chaos(1, 3)])
def test_every_world_size_does_what_plain_torch_does(world_size: int, tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path)
    outcome = train_to_end(Job(run_dir, SPEC, world_size, setup=QUIET), tmp_path)
    losses, model = plain_run()
    assert outcome.losses == pytest.approx(dict(enumerate(losses, start=1)), rel=1e-4)
    weights = weights_of(run_dir)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)
    measured = outcome.of_kind(EventKind.EVALUATED)
    assert [data["step"] for data in measured] == [5, 10, 11]
    assert set(measured[0]["metrics"]) == {"val_score"}
    [closed, _] = outcome.of_kind(EventKind.EPOCH_COMPLETED)
    assert (closed["samples"], closed["used_once"], closed["missing"]) == (53, 53, 0)


@pytest.mark.parametrize(
    ("world_size", "rank", "update", "place"),
    [
        (2, 1, 5 * UPDATES + 2, "before"),  # its peer waits in the critic's second step
        *only_in_chaos((2, 0, 5 * UPDATES + 3, "before")),  # the critic has stepped on both
        (3, 2, 6 * UPDATES + 3, "after"),  # all have stepped both, and none has committed
        *only_in_chaos((1, 0, 5 * UPDATES + 3, "after")),
    ],
)
def test_a_kill_within_a_step_loses_and_repeats_nothing(
    world_size: int, rank: int, update: int, place: str, tmp_path: Path
) -> None:
    begun = (update - 1) // UPDATES
    calm, killed = make_run_dir(tmp_path, "calm"), make_run_dir(tmp_path, "killed")
    unbroken = train_to_end(Job(calm, SPEC, world_size, setup=GAN), tmp_path)
    setup = f"{GAN}_killed_{rank}_{update}_{place}"
    first = run_ranks(Job(killed, SPEC, world_size, setup=setup), tmp_path)
    assert first[rank].exit_code == -9
    resumed = train_to_end(Job(killed, SPEC, world_size, attempt=2, setup=GAN), tmp_path)
    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert restored["source"] == "snapshot"
    if world_size > 1:
        assert restored["step"] == begun
    known = points_of(*[outcome for outcome in first if outcome.exit_code == 0], resumed)
    whole = points_of(unbroken)
    assert known == {step: whole[step] for step in known}
    assert set(known) >= set(range(restored["step"] + 1, NUM_STEPS + 1))
    before, after = weights_of(calm), weights_of(killed)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_rank_that_dies_before_the_gate_and_a_checkpoint_at_another_size(
    tmp_path: Path,
) -> None:
    run_dir = make_run_dir(tmp_path)
    survivor, _ = run_ranks(Job(run_dir, SPEC, 2, killed=(1, 4), setup=QUIET), tmp_path)
    stopped = train_to_end(
        Job(run_dir, SPEC, 3, attempt=2, stopped=("pause", 7), setup=QUIET), tmp_path
    )
    assert stopped.of_kind(EventKind.RESTORED)[0]["step"] == 4
    ended = train_to_end(Job(run_dir, SPEC, 1, submission=2, setup=QUIET), tmp_path)
    restored = ended.of_kind(EventKind.RESTORED)[0]
    assert (restored["source"], restored["step"]) == ("checkpoint", 8)
    losses, model = plain_run()
    known = survivor.losses | stopped.losses | ended.losses
    assert known == pytest.approx(dict(enumerate(losses, start=1)), rel=1e-4)
    weights = weights_of(run_dir)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_ranks_that_step_other_optimizers_are_refused(tmp_path: Path) -> None:
    """The exchange itself cannot tell the two apart."""
    setup = f"{MODULE}:uneven"
    outcomes = run_ranks(Job(make_run_dir(tmp_path), SPEC, 2, setup=setup), tmp_path)
    errors = [str(outcome.error) for outcome in outcomes]
    for rank, each in enumerate(errors):
        assert "the ranks do not step the same optimizers in the same order" in each, errors
        assert f"of step 3, of optimizer '{('critic', 'generator')[rank]}'" in each
    assert [set(outcome.losses) for outcome in outcomes] == [{1, 2}, set()]


@pytest.mark.parametrize(
    "silent",
    [
        SilentOptions(run_ahead=True, delay_s=0.002),
        pytest.param(SilentOptions(abort_s=6.0), marks=pytest.mark.chaos),
    ],
    ids=["ahead", "slow"],
)
def test_a_kill_costs_nothing_where_collectives_hang(silent: SilentOptions, tmp_path: Path) -> None:
    """A rank that waits for a dead one in an optimizer's step leaves the state from before it."""
    calm, killed = make_run_dir(tmp_path, "calm"), make_run_dir(tmp_path, "killed")
    unbroken = train_to_end(Job(calm, SPEC, 2, setup=GAN), tmp_path)
    death = Job(killed, SPEC, 2, setup=f"{GAN}_killed_1_17_before", silent=silent)
    survivor, _ = run_ranks(death, tmp_path)
    assert isinstance(survivor.error, StepFailed)
    assert (survivor.error.error.type, survivor.error.error.snapshot_step) == ("PeersGone", 5)
    resumed = train_to_end(Job(killed, SPEC, 2, attempt=2, setup=GAN, silent=silent), tmp_path)
    assert resumed.of_kind(EventKind.RESTORED)[0]["step"] == 5
    assert points_of(survivor) | points_of(resumed) == points_of(unbroken)
    before, after = weights_of(calm), weights_of(killed)
    assert all(torch.equal(before[name], after[name]) for name in before)
