"""The last save: the newest state that ranks left becomes a checkpoint, without a rank and without
the user's code."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.errors import StorageFull
from storage.filesystem import open_storage
from storage.logs.journal import JournalEvent
from storage.logs.journal_writer import JournalWriter
from storage.run_control import Distrust
from storage.run_dir import RunDir
from tests.support.saves import advance, make_context, make_state
from tests.support.storage_places import record_restored
from train_fn.checkpoints.commit import load_checkpoint
from train_fn.context import WorkerContext
from train_fn.recovery.history import read_history
from train_fn.snapshots import forgotten, leaving
from train_fn.snapshots.last_save import LastSave, save_own
from train_fn.snapshots.leaving import leave_snapshot, publish_snapshot
from train_fn.snapshots.store import SnapshotStore, snapshot_store
from train_fn.state.tensor_tree import copy_to_cpu, digest

pytestmark = pytest.mark.usefixtures("shared_memory")

DEADLINE_S = 20.0


def left(tmp_path: Path, *steps: int) -> WorkerContext:
    """A rank that published its state after each of these steps."""
    ctx, state = make_context(tmp_path), make_state()
    for step in steps:
        advance(state, step)
        assert publish_snapshot(ctx, copy_to_cpu(state.state_dict())) is None
    return ctx


def saved(ctx: WorkerContext) -> LastSave | None:
    return save_own(ctx.run_dir, ctx.spec, snapshot_store(ctx), world_size=3)


def test_the_newest_state_becomes_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    ctx, state = left(tmp_path, 3), make_state()
    advance(state, 7)
    expected = copy_to_cpu(state.state_dict())
    assert leave_snapshot(ctx, expected) is None
    found = saved(ctx)
    assert found is not None and found.manifest is not None and found.step == 7
    assert found.summary == f"step 7 is kept as checkpoint {found.manifest.name}"
    assert (found.manifest.world_size, found.manifest.sample_digest) == (
        3,
        state.ledger.state_dict()["chain"],
    )
    manifest, loaded, _ = ctx.checkpoints.read_newest(
        lambda manifest: load_checkpoint(ctx.run_dir, manifest)
    )
    assert manifest == found.manifest and loaded is not None and digest(loaded) == digest(expected)
    assert saved(ctx) is None, "a checkpoint is as new"


def test_nothing_is_saved_of_a_run_that_took_no_step(tmp_path: Path) -> None:
    assert saved(make_context(tmp_path)) is None
    ctx, state = make_context(tmp_path), make_state()
    state.complete = True
    assert leave_snapshot(ctx, copy_to_cpu(state.state_dict())) is None
    assert saved(ctx) is None


def test_a_damaged_snapshot_is_passed_over_and_named_where_no_other_is_left(tmp_path: Path) -> None:
    ctx = left(tmp_path, 4, 5)
    for path in sorted(snapshot_store(ctx).directory.glob("*5-r0.pt")):
        path.write_bytes(path.read_bytes()[:-40])
    found = saved(ctx)
    assert found is not None and found.manifest is not None and found.manifest.step == 4
    lost = left(tmp_path / "other", 9)
    for path in snapshot_store(lost).directory.glob("*.pt"):
        path.write_bytes(b"")
    found = saved(lost)
    assert found is not None and found.manifest is None
    assert found.summary.startswith("step 9 could not be kept: snapshot of step 9 by rank 0")


def test_a_state_that_a_later_attempt_went_on_without_is_not_saved(tmp_path: Path) -> None:
    ctx = left(tmp_path, 8)
    record_restored(ctx.run_dir, 2, 5, "checkpoint")
    later = dataclasses.replace(ctx, submission=2)
    assert saved(later) is None


def test_a_state_that_may_hold_wrong_bits_is_not_saved(tmp_path: Path) -> None:
    """A publisher may have left it after the ranks struck what they had."""
    ctx = left(tmp_path, 6, 8)
    ctx.run_dir.distrust(Distrust(ctx.submission, ctx.attempt, 6))
    found = saved(ctx)
    assert found is not None and found.manifest is not None and found.step == 6
    ctx = left(tmp_path / "other", 9)
    ctx.run_dir.distrust(Distrust(ctx.submission, ctx.attempt, 0))
    assert saved(ctx) is None


def test_a_storage_that_takes_nothing_is_the_problem_and_the_state_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: CheckpointStore, step: int, submission: int, attempt: int) -> None:
        raise StorageFull("no space left")

    ctx = left(tmp_path, 6)
    monkeypatch.setattr(CheckpointStore, "begin", refuse)
    found = saved(ctx)
    assert found == LastSave(6, problem="StorageFull: no space left")
    assert [label.step for label in snapshot_store(ctx).labels()] == [6]


def test_an_older_state_gives_way_where_only_that_makes_room_for_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "OVERHEAD_BYTES", 0)
    ctx, state = left(tmp_path, 1), make_state()
    advance(state, 2)
    taken = snapshot_store(ctx).size_bytes()

    def free_bytes(store: SnapshotStore) -> int:
        return taken - store.size_bytes()

    monkeypatch.setattr(SnapshotStore, "free_bytes", free_bytes)
    assert leave_snapshot(ctx, copy_to_cpu(state.state_dict())) is None
    assert [label.step for label in snapshot_store(ctx).labels()] == [2]


def end(run_dir: RunDir, outcome: str | None, code: str | None = None) -> None:
    reason = {"code": code, "message": ""} if code else None
    data = {"outcome": outcome, "reason": reason, "step": 5}
    started = JournalEvent(
        kind=EventKind.SUBMISSION_STARTED,
        at=1.0,
        submission=1,
        attempt=0,
        data={},
        source="d",
        source_n=1,
    )
    finished = JournalEvent(
        kind=EventKind.FINISHED, at=2.0, submission=1, attempt=1, data=data, source="d", source_n=2
    )
    with JournalWriter(run_dir, 1) as journal:
        journal.append([started, finished] if outcome else [started])


@pytest.mark.parametrize(
    ("outcome", "code", "stays"),
    [
        (None, None, True),  # it waits for capacity, say
        ("stopped", "paused_by_user", True),
        ("stopped", "storage_unavailable", True),
        ("stopped", "cancelled_by_user", False),
        ("failed", "user_error", False),
        ("succeeded", None, False),
    ],
)
def test_old_snapshots_stay_as_long_as_their_run_may_go_on_from_them(
    outcome: str | None, code: str | None, stays: bool, tmp_path: Path, shared_memory: Path
) -> None:
    ctx = left(tmp_path / "others", 5)
    end(ctx.run_dir, outcome, code)
    sweeper = dataclasses.replace(ctx, run_dir=RunDir(open_storage(str(tmp_path)), "run_sweeps"))
    directory = shared_memory / ctx.run_dir.run_id

    def sweep(age_s: float) -> bool:
        """Whether the directory is there after a sweep."""
        for path in (directory, *directory.iterdir()):
            os.utime(path, (time.time() - age_s, time.time() - age_s))
        sweeping = forgotten.sweep_forgotten(sweeper)
        if sweeping is not None:
            sweeping.join(DEADLINE_S)
        return directory.exists()

    assert sweep(forgotten.FORGOTTEN_S - 60), "it is new"
    assert sweep(forgotten.FORGOTTEN_S + 60) is stays
    if stays:
        assert saved(ctx) is not None
        assert not sweep(forgotten.FORGOTTEN_S + 60), "a checkpoint is as new"


def test_a_run_s_end_leaves_another_storage_s_run_of_the_same_name_alone(tmp_path: Path) -> None:
    one, other = left(tmp_path / "one", 1), left(tmp_path / "other", 2)
    assert snapshot_store(one).directory.parent == snapshot_store(other).directory.parent
    snapshot_store(one).remove_all()
    assert not snapshot_store(one).labels() and [
        label.step for label in snapshot_store(other).labels()
    ] == [2]
    snapshot_store(other).remove_all()
    assert not snapshot_store(other).directory.parent.exists()


def test_history_knows_every_node_that_ever_ran_ranks(tmp_path: Path) -> None:
    run_dir = make_context(tmp_path).run_dir
    events = [
        JournalEvent(
            kind=EventKind.ATTEMPT_STARTED,
            at=1.0,
            submission=1,
            attempt=attempt,
            data={
                "world_size": len(nodes),
                "workers": [{"rank": r, "node_id": n, "pid": 1} for r, n in enumerate(nodes)],
            },
            source="c",
            source_n=attempt,
        )
        for attempt, nodes in enumerate(["ab", "bc"], start=1)
    ]
    with JournalWriter(run_dir, 1) as journal:
        journal.append(events)
    history = read_history(run_dir)
    assert history.nodes == {"a", "b", "c"} and [place.node_id for place in history.workers] == [
        "b",
        "c",
    ]
