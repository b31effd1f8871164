"""Ranks of one node read the state that one of them left there. Nothing travels between them,
unless one cannot read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness import assert_same, final_state, make_spec
from tests.support.silent_backend import SilentOptions
from train_fn.snapshots import store
from train_fn.snapshots import whole as broadcast
from train_fn.snapshots.store import SnapshotStore, node_snapshots

BACKENDS = pytest.mark.parametrize("silent", [None, SilentOptions()], ids=["gloo", "silent"])
DIES_AT = 13


def broken(tmp_path: Path, silent: SilentOptions | None) -> tuple[Job, RunDir, SnapshotStore]:
    """An undisturbed run, and one of which a rank of three has died, all on one node."""
    spec = make_spec("batch")
    peace, run_dir = make_run_dir(tmp_path, "peace"), make_run_dir(tmp_path, "broken")
    train_to_end(Job(peace, spec, 3, one_node=True), tmp_path)
    job = Job(run_dir, spec, 3, killed=(1, DIES_AT), one_node=True, silent=silent)
    run_ranks(job, tmp_path)
    return job, peace, node_snapshots(run_dir, "node", 1)


def resume(job: Job, tmp_path: Path, setup: str) -> dict[str, Any]:
    again = Job(
        job.run_dir,
        job.spec,
        3,
        attempt=2,
        one_node=True,
        silent=job.silent,
        setup=f"{__name__}:{setup}",
    )
    [restored] = train_to_end(again, tmp_path).of_kind(EventKind.RESTORED)
    return restored


@BACKENDS
def test_ranks_of_one_node_take_the_state_from_its_memory(
    tmp_path: Path, silent: SilentOptions | None
) -> None:
    job, peace, left = broken(tmp_path, silent)
    assert [label.step for label in left.labels()] == [DIES_AT], "of two survivors one has written"
    restored = resume(job, tmp_path, "send_no_tensor")
    assert (restored["source"], restored["step"]) == ("snapshot", DIES_AT)
    assert_same(final_state(peace), final_state(job.run_dir))


@BACKENDS
def test_a_rank_that_cannot_read_it_takes_the_state_from_another_one(
    tmp_path: Path, silent: SilentOptions | None
) -> None:
    job, peace, _ = broken(tmp_path, silent)
    restored = resume(job, tmp_path, "be_unable_to_read_on_rank_2")
    assert (restored["source"], restored["step"]) == ("snapshot", DIES_AT)
    assert_same(final_state(peace), final_state(job.run_dir))


def test_a_damaged_state_is_taken_by_no_rank(tmp_path: Path) -> None:
    job, peace, left = broken(tmp_path, None)
    [label] = left.labels()
    path = left._state_path(label)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    # the save of step 10 may not have ended when the rank died
    saved = [found.step for found in CheckpointStore(job.run_dir).list()]
    assert set(saved) <= {10}
    restored = resume(job, tmp_path, "send_what_there_is")
    newest = ("checkpoint", 10) if saved else ("fresh", 0)
    assert (restored["source"], restored["step"]) == newest
    assert "does not have the digest" in restored["rejected"][0]["problem"]
    assert_same(final_state(peace), final_state(job.run_dir))


def send_what_there_is() -> None:
    """Change nothing."""


def send_no_tensor() -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a tensor of the state is sent")

    broadcast._flat = refuse


def be_unable_to_read_on_rank_2() -> None:
    read_state = store.read_state

    def read(path: Path) -> Any:
        if dist.get_rank() == 2:
            raise OSError(12, "Cannot allocate memory", str(path))
        return read_state(path)

    store.read_state = read
