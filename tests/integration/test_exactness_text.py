"""A language model over several ranks: a killed rank loses no step, and tokens are weighed the same
at any world size."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness import assert_same, final_state, merged_losses
from tests.integration.test_exactness_alone import make_text_spec


def test_survivors_of_a_killed_rank_lose_no_step_of_a_language_model(tmp_path: Path) -> None:
    whole, broken = make_run_dir(tmp_path, "run_whole"), make_run_dir(tmp_path, "run_broken")
    spec = make_text_spec(tmp_path)
    reference = train_to_end(Job(whole, spec, 2), tmp_path)
    outcomes = run_ranks(Job(broken, spec, 2, killed=(1, 13)), tmp_path)
    resumed = train_to_end(Job(broken, spec, 2, attempt=2), tmp_path)
    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert restored["source"] == "snapshot"
    assert restored["step"] >= 13
    assert merged_losses(outcomes[0], resumed) == reference.losses
    assert_same(final_state(whole), final_state(broken))


@pytest.mark.chaos
def test_a_language_model_learns_the_same_at_another_world_size(tmp_path: Path) -> None:
    spec = make_text_spec(tmp_path)
    alone = train_to_end(Job(make_run_dir(tmp_path, "run_1"), spec, 1), tmp_path)
    three = train_to_end(Job(make_run_dir(tmp_path, "run_3"), spec, 3), tmp_path)
    for step, loss in alone.losses.items():
        assert three.losses[step] == pytest.approx(loss, rel=1e-3), step
    evaluations = [
        outcome.of_kind(EventKind.EVALUATED)[-1]["metrics"]["ema_val_bits_per_token"]
        for outcome in (alone, three)
    ]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-3)
