"""A run that is forked over several ranks: bit for bit at the parent's world size, to float
tolerance at another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.run_dir import RunDir
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness import LAST_STEP, assert_same, final_state, make_spec

FORK_STEP = 20
"""The sixth global batch of the second epoch comes next."""

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, dict[str, Any]]:
    tmp_path = tmp_path_factory.mktemp("parent")
    run_dir = make_run_dir(tmp_path, "run_parent")
    train_to_end(Job(run_dir, make_spec(), 2), tmp_path)
    return run_dir, final_state(run_dir)


def fork_of(run_dir: RunDir, spec: RunSpec) -> RunSpec:
    return RunSpec.model_validate(
        {**spec.model_dump(), "resume_from": {"run_id": run_dir.run_id, "step": FORK_STEP}}
    )


def test_a_fork_ends_as_its_parent_did(
    parent: tuple[RunDir, dict[str, Any]], tmp_path: Path
) -> None:
    run_dir, expected = parent
    child = RunDir(run_dir.storage, f"{run_dir.run_id}-same")
    outcome = train_to_end(Job(child, fork_of(run_dir, make_spec()), 2), tmp_path)
    assert sorted(outcome.losses) == list(range(FORK_STEP + 1, LAST_STEP + 1))
    assert_same(final_state(child), expected)


def test_a_fork_at_another_world_size_uses_the_same_samples(
    parent: tuple[RunDir, dict[str, Any]], tmp_path: Path
) -> None:
    run_dir, expected = parent
    child = RunDir(run_dir.storage, f"{run_dir.run_id}-other")
    outcome = train_to_end(Job(child, fork_of(run_dir, make_spec()), 3), tmp_path)
    found = final_state(child)
    assert found["train_state.pt"]["ledger"] == expected["train_state.pt"]["ledger"]
    for name, weights in expected["model.pt"].items():
        torch.testing.assert_close(found["model.pt"][name], weights, rtol=1e-3, atol=1e-4)
    [epoch] = outcome.of_kind(EventKind.EPOCH_COMPLETED)
    assert (epoch["epoch"], epoch["duplicates"], epoch["missing"]) == (1, 0, 0)


def test_every_rank_hears_why_a_fork_is_refused(
    parent: tuple[RunDir, dict[str, Any]], tmp_path: Path
) -> None:
    run_dir, _ = parent
    child = RunDir(run_dir.storage, f"{run_dir.run_id}-refused")
    outcomes = run_ranks(Job(child, fork_of(run_dir, make_spec(norm="batch")), 2), tmp_path)
    for outcome in outcomes:
        assert outcome.error is not None and "only in this run's model" in str(outcome.error)
