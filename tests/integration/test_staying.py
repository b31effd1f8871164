"""Survivors keep their processes: they form the next group with what they hold in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from tests.integration.ranks import Job, Outcome, make_run_dir, train_to_end
from tests.integration.staying_ranks import StayingRanks, staying_ranks
from tests.integration.test_exactness import (
    LAST_STEP,
    assert_same,
    final_state,
    make_spec,
    merged_losses,
)
from train_fn.node.node_dir import shared_memory_root
from train_fn.recovery.rank_error import StepFailed


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[StayingRanks]:
    with staying_ranks(tmp_path) as found:
        yield found


def stays_at(outcome: Outcome) -> int | None:
    """Return at which step a rank stayed in its process."""
    assert isinstance(outcome.error, StepFailed), outcome
    return outcome.error.error.stays_at


def restored(outcome: Outcome) -> tuple[str, int]:
    [data] = outcome.of_kind(EventKind.RESTORED)
    return data["source"], data["step"]


def require_done(outcomes: list[Outcome]) -> Outcome:
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.exit_code is None
    return outcomes[0]


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_survivors_go_on_with_one_that_joins_and_nothing_shows_it(
    killed: int, ranks: StayingRanks, tmp_path: Path
) -> None:
    whole, broken = make_run_dir(tmp_path, "run_whole"), make_run_dir(tmp_path, "run_broken")
    spec = make_spec("batch")
    reference = train_to_end(Job(whole, spec, 3), tmp_path)
    job = Job(broken, spec, 3, in_process=True)
    first = ranks.run(Job(broken, spec, 3, in_process=True, killed=(killed, 13)), "ABC")
    kept = [stays_at(outcome) for rank, outcome in enumerate(first) if rank != killed]
    assert set(kept) <= {13, 14}, first
    assert not (shared_memory_root() / broken.run_id).exists(), "nobody wrote a snapshot"
    names = "ABC".replace("ABC"[killed], "D")
    second = require_done(ranks.run(Job(broken, spec, 3, attempt=2, in_process=True), names))
    assert restored(second) == ("process", max(kept))
    survivor = first[(killed + 1) % 3]
    assert merged_losses(survivor if killed == 0 else first[0], second) == reference.losses
    assert_same(final_state(whole), final_state(broken))
    assert job.world_size == 3 and max(reference.losses) == LAST_STEP
