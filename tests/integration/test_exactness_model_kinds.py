"""Lazy layers at every world size, and negatives from all ranks' samples over a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from tests.integration.model_kinds import plain_lazy_run
from tests.integration.moving_buffers import NUM_STEPS, SPEC
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.support.two_groups import only_in_chaos

KINDS = "tests.integration.model_kinds"


@pytest.mark.parametrize("world_size", [2, *only_in_chaos(1)])
def test_lazy_layers_take_their_shape_before_anything_else_is_built(
    world_size: int, tmp_path: Path
) -> None:
    spec = SPEC.model_validate(
        SPEC.model_dump() | {"train": {**SPEC.train.model_dump(), "ema_decay": 0.9}}
    )
    job = Job(make_run_dir(tmp_path), spec, world_size, setup=f"{KINDS}:LazyTask")
    assert train_to_end(job, tmp_path).losses == pytest.approx(plain_lazy_run(), rel=1e-4)


def test_negatives_from_all_ranks_are_exact_over_a_kill_at_the_same_size(tmp_path: Path) -> None:
    """The shares are of three and two micro-batches, and an epoch's last global batch is short."""
    calm, killed = make_run_dir(tmp_path, "calm"), make_run_dir(tmp_path, "killed")
    setup = f"{KINDS}:clip_task"
    unbroken = train_to_end(Job(calm, SPEC, 2, setup=setup), tmp_path)
    survivor, _ = run_ranks(Job(killed, SPEC, 2, killed=(1, 5), setup=setup), tmp_path)
    resumed = train_to_end(Job(killed, SPEC, 2, attempt=2, setup=setup), tmp_path)
    assert resumed.of_kind(EventKind.RESTORED)[0]["source"] == "snapshot"
    assert survivor.losses | resumed.losses == unbroken.losses
    assert len(unbroken.losses) == NUM_STEPS and unbroken.losses[NUM_STEPS] < unbroken.losses[1]
