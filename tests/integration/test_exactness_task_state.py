"""A task's own state is that of the last committed step after every restart, and at every world
size."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from tests.integration.moving_buffers import NUM_STEPS, SPEC
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.stateful_task import plain_losses
from tests.support.two_groups import only_in_chaos

SETUP = "tests.integration.stateful_task:annealed_task"


@pytest.mark.parametrize(("world_size", "killed"), [(3, 0), *only_in_chaos((2, 1))])
def test_a_survivors_snapshot_holds_the_tasks_state(
    world_size: int, killed: int, tmp_path: Path
) -> None:
    run_dir = make_run_dir(tmp_path)
    first = run_ranks(Job(run_dir, SPEC, world_size, killed=(killed, 6), setup=SETUP), tmp_path)
    second = train_to_end(Job(run_dir, SPEC, world_size - 1, attempt=2, setup=SETUP), tmp_path)
    [restored] = second.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("snapshot", 6)
    losses = first[1 - min(killed, 1)].losses | second.losses if killed else second.losses
    right = plain_losses(NUM_STEPS)
    assert set(range(7, NUM_STEPS + 1)) <= losses.keys()
    for step, loss in losses.items():
        assert loss == pytest.approx(right[step - 1], rel=1e-4), step


def test_a_checkpoint_holds_the_tasks_state(tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path)
    first = train_to_end(Job(run_dir, SPEC, 1, stopped=("pause", 4), setup=SETUP), tmp_path)
    second = train_to_end(Job(run_dir, SPEC, 2, submission=2, setup=SETUP), tmp_path)
    assert second.of_kind(EventKind.RESTORED)[0]["source"] == "checkpoint"
    losses = first.losses | second.losses
    assert [losses[step] for step in sorted(losses)] == pytest.approx(
        plain_losses(NUM_STEPS), rel=1e-4
    )
