"""A scheduler of the task's, its hook after each step, and the step in its loss: what plain torch
does on one rank, at every world size, over kills, checkpoints and forks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everstep.wire.events import EventKind
from storage.run_dir import RunDir
from tests.integration.moving_buffers import NUM_STEPS, SPEC
from tests.integration.own_steps_task import weights_of
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.telling_task import Telling, plain_run
from tests.support.two_groups import only_in_chaos

SETUP = "tests.integration.telling_task:Telling"


def assert_right(run_dir: RunDir, losses: dict[int, float]) -> None:
    right, model = plain_run()
    assert losses == pytest.approx(right, rel=1e-4)
    weights, wanted = weights_of(run_dir), model.state_dict()
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("world_size", [2, *only_in_chaos(1, 3)])
def test_every_world_size_does_what_plain_torch_does(world_size: int, tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path)
    outcome = train_to_end(Job(run_dir, SPEC, world_size, setup=SETUP), tmp_path)
    assert_right(run_dir, outcome.losses)


def test_a_kill_loses_and_repeats_nothing_and_the_result_is_bitwise_that_of_no_kill(
    tmp_path: Path,
) -> None:
    calm, killed = make_run_dir(tmp_path, "calm"), make_run_dir(tmp_path, "killed")
    unbroken = train_to_end(Job(calm, SPEC, 2, setup=SETUP), tmp_path)
    survivor, _ = run_ranks(Job(killed, SPEC, 2, killed=(1, 5), setup=SETUP), tmp_path)
    resumed = train_to_end(Job(killed, SPEC, 2, attempt=2, setup=SETUP), tmp_path)
    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("snapshot", 5)
    assert survivor.losses | resumed.losses == unbroken.losses
    before, after = weights_of(calm), weights_of(killed)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert before["place"] == NUM_STEPS % 6


def test_a_checkpoint_and_a_fork_of_it_go_on_at_another_size(tmp_path: Path) -> None:
    run_dir, fork = make_run_dir(tmp_path), make_run_dir(tmp_path, "fork")
    first = train_to_end(Job(run_dir, SPEC, 3, stopped=("pause", 4), setup=SETUP), tmp_path)
    origin = {"run_id": run_dir.run_id, "step": "latest"}
    spec = SPEC.model_validate(SPEC.model_dump() | {"resume_from": origin})
    run_dir.write_spec(SPEC)
    forked = train_to_end(Job(fork, spec, 2, setup=SETUP), tmp_path)
    assert forked.of_kind(EventKind.RESTORED)[0]["source"] == "fork"
    assert_right(fork, first.losses | forked.losses)
    resumed = train_to_end(Job(run_dir, SPEC, 1, submission=2, setup=SETUP), tmp_path)
    assert resumed.of_kind(EventKind.RESTORED)[0]["source"] == "checkpoint"
    assert_right(run_dir, first.losses | resumed.losses)


def test_a_hook_that_does_something_else_on_one_rank_is_refused_at_once(tmp_path: Path) -> None:
    setup = SETUP.replace(":Telling", ":Partial")
    outcomes = run_ranks(Job(make_run_dir(tmp_path), SPEC, 2, setup=setup), tmp_path)
    for outcome in outcomes:
        assert "Partial.after_step (" in str(outcome.error)
        assert "left different values on the ranks: place, queue, " in str(outcome.error)
    assert outcomes[0].losses.keys() == set()


def test_a_frozen_base_that_no_state_holds_changes_nothing_of_a_recovery(tmp_path: Path) -> None:
    """The restored ranks have the base from the task, and the rest from the survivor."""
    setup = "tests.integration.adapted_task:LoRA"
    lean = SPEC.model_validate(SPEC.model_dump() | {"checkpoint": {"parameters": "trainable"}})
    calm, killed = make_run_dir(tmp_path, "calm"), make_run_dir(tmp_path, "killed")
    unbroken = train_to_end(Job(calm, SPEC, 2, setup=setup), tmp_path)
    survivor, _ = run_ranks(Job(killed, lean, 2, killed=(1, 5), setup=setup), tmp_path)
    resumed = train_to_end(Job(killed, lean, 2, attempt=2, setup=setup), tmp_path)
    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("snapshot", 5)
    assert survivor.losses | resumed.losses == unbroken.losses
    whole, kept = weights_of(calm), weights_of(killed)
    assert all(torch.equal(value, whole[name]) for name, value in kept.items())
    assert {name.split(".")[0] for name in whole.keys() - kept.keys()} == {"base", "tied"}


def test_the_task_s_scheduler_multiplies_the_rate_that_is_there() -> None:
    """Otherwise a scheduler whose state were lost would do no harm here."""
    weights = [torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.SGD(weights, lr=0.05)
    scheduler = Telling().build_scheduler(optimizer, NUM_STEPS)
    optimizer.step()
    rates = []
    for _ in range(NUM_STEPS):
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert len(set(rates)) == NUM_STEPS and "initial_lr" in optimizer.param_groups[0]
