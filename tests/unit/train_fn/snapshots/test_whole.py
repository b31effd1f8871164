"""The publisher: as often as it may, never a torn state, never more than two of them, and a word
when they do not fit."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.one_rank import journal_of
from tests.support.saves import advance, make_context, make_state
from tests.support.storage_places import quick_directory
from train_fn.checkpoints.save_slot import BoundaryCopies
from train_fn.context import WorkerContext
from train_fn.snapshots import forgotten
from train_fn.snapshots import store as snapshot_module
from train_fn.snapshots import whole as whole_module
from train_fn.snapshots.election import Candidate, elect
from train_fn.snapshots.keeper import Restored
from train_fn.snapshots.leaving import OVERHEAD_BYTES, leave_snapshot, publish_snapshot
from train_fn.snapshots.store import SnapshotStore, snapshot_store
from train_fn.snapshots.whole import Cadence, WholeKeeper
from train_fn.state.tensor_tree import copy_to_cpu, digest, size_bytes
from train_fn.state.train_state import TrainState
from train_fn.step.peers import Peers

pytestmark = [pytest.mark.own_process, pytest.mark.usefixtures("shared_memory")]

ROOT = Path(__file__).parents[4]
DEADLINE_S = 20.0


@pytest.fixture
def at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_module, "COST_RATIO", 0.0)


def make_publisher(
    ctx: WorkerContext, state: TrainState, copies: BoundaryCopies | None = None
) -> WholeKeeper:
    made = WholeKeeper(ctx, Peers(ctx.world_rank, ctx.world_size, ctx.device), state)
    made.open(copies or BoundaryCopies(state), lambda own: [own], Restored("fresh", 0, None, ()))
    return made


def publish(publisher: WholeKeeper, state: TrainState, step: int) -> None:
    """Offer the state of ``step``, and wait until nothing is being written."""
    advance(state, step)
    publisher.after_step()
    with publisher._lock:
        assert publisher._lock.wait_for(
            lambda: publisher._waiting is None and not publisher._writing, DEADLINE_S
        )


def steps(ctx: WorkerContext) -> list[int]:
    return [label.step for label in snapshot_store(ctx).labels()]


def snapshot_events(ctx: WorkerContext) -> list[dict[str, Any]]:
    return journal_of(ctx).of_kind(EventKind.SNAPSHOTS)


# ---------------------------------------------------------------- when


@given(st.lists(st.tuples(st.floats(1e-4, 3.0), st.floats(1e-6, 2.0)), min_size=1, max_size=200))
def test_publishing_takes_one_percent_of_any_stretch_at_most_and_is_not_put_off(
    steps: list[tuple[float, float]],
) -> None:
    """``steps``: how long each one takes, and what a publication after it would; a publication
    delays the next step."""
    cadence, now = Cadence(), 0.0
    published: list[tuple[float, float]] = []
    for step_s, cost_s in steps:
        now += step_s
        allowed = not published or now >= published[-1][0] + 100 * published[-1][1]
        assert cadence.is_due(now) == allowed
        if cadence.is_due(now):
            cadence.done(now, cost_s)
            published.append((now, cost_s))
            now += cost_s
    for first in range(len(published)):
        for last in range(first + 1, len(published)):
            spent = sum(cost for _, cost in published[first:last])
            assert spent <= 0.01 * (published[last][0] - published[first][0]) * (1 + 1e-9)


# ---------------------------------------------------------------- what


def assert_whole(store: SnapshotStore) -> list[int]:
    """Every snapshot on the node holds one step's state and nothing of any other; their steps."""
    found = []
    for label in store.labels():
        try:
            state = store.read(label)
        except FileNotFoundError:
            continue  # replaced by a newer one while we looked
        weights = torch.cat([tensor.reshape(-1) for tensor in state["model"].values()])
        assert torch.equal(weights, torch.full_like(weights, float(state["step"]))), (
            f"the state of step {state['step']} is torn"
        )
        found.append(label.step)
    return found


@pytest.mark.usefixtures("at_every_step")
def test_steps_that_go_on_meanwhile_do_not_show_in_what_is_published(tmp_path: Path) -> None:
    ctx, model = make_context(tmp_path), nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    state = make_state(model, torch.optim.SGD(model.parameters()))
    publisher, store = make_publisher(ctx, state), snapshot_store(ctx)
    met: set[int] = set()
    deadline, step = time.monotonic() + DEADLINE_S, 0
    while len(met) < 12:
        assert time.monotonic() < deadline
        step += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(step))
        state.step = step
        publisher.after_step()
        if step % 7 == 0:
            met.update(assert_whole(store))
    publisher.close()
    assert assert_whole(store) == sorted(steps(ctx))[-2:]
    assert snapshot_events(ctx) == []


@pytest.mark.usefixtures("at_every_step")
def test_two_snapshots_are_kept_and_no_more_is_ever_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, state, held = make_context(tmp_path), make_state(), []
    write_state = snapshot_module.write_state

    def count_and_save(*args: Any) -> str:
        written = write_state(*args)
        held.append(
            len(
                [path for path in snapshot_store(ctx).directory.iterdir() if path.suffix != ".json"]
            )
        )
        return written

    monkeypatch.setattr(snapshot_module, "write_state", count_and_save)
    publisher = make_publisher(ctx, state)
    for step in (1, 2, 3, 4, 5):
        publish(publisher, state, step)
    publisher.close()
    assert steps(ctx) == [4, 5]
    assert held == [1, 2, 2, 2, 2]  # the one being written among them


# ---------------------------------------------------------------- who, and when not


@pytest.mark.usefixtures("at_every_step")
def test_what_does_not_fit_is_told_once_and_again_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, state = make_context(tmp_path), make_state()
    publisher, free = make_publisher(ctx, state), [1000]
    monkeypatch.setattr(SnapshotStore, "free_bytes", lambda _: free[0])
    for step in (1, 2, 3):
        publish(publisher, state, step)
    assert steps(ctx) == []
    [problem] = snapshot_events(ctx)
    assert (problem["step"], problem["snapshots"]) == (1, "none")
    assert "does not fit the 1000 bytes" in problem["problem"]
    free[0] = 1 << 30
    publish(publisher, state, 4)
    publisher.close()
    assert snapshot_events(ctx)[1:] == [{"step": 4, "snapshots": "published", "problem": None}]


def test_survivors_that_could_leave_nothing_are_told_of_while_they_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = dataclasses.replace(make_context(tmp_path), world_size=2, num_nodes=2)
    monkeypatch.setattr(SnapshotStore, "free_bytes", lambda _: 1000)
    publisher = make_publisher(ctx, make_state())
    publisher.after_step()
    publisher.after_step()
    assert [data["snapshots"] for data in snapshot_events(ctx)] == ["none"]


def test_room_for_two_states_is_enough_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, state = make_context(tmp_path), make_state()
    needed = size_bytes(state.state_dict()) + OVERHEAD_BYTES

    def free_bytes(store: SnapshotStore) -> int:
        return (2 - len(list(store.directory.glob("*.pt")))) * needed

    monkeypatch.setattr(SnapshotStore, "free_bytes", free_bytes)
    for step in (1, 2, 3, 4):
        advance(state, step)
        assert publish_snapshot(ctx, state.state_dict()) is None
    assert steps(ctx) == [3, 4]


@pytest.mark.usefixtures("at_every_step")
def test_closing_waits_for_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    write_state = snapshot_module.write_state

    def save_slowly(*args: Any) -> str:
        begun.set()
        assert go.wait(DEADLINE_S)
        return write_state(*args)

    monkeypatch.setattr(snapshot_module, "write_state", save_slowly)
    ctx, state = make_context(tmp_path), make_state()
    publisher = make_publisher(ctx, state)
    advance(state, 1)
    publisher.after_step()
    assert begun.wait(DEADLINE_S)
    advance(state, 2)
    publisher.after_step()  # busy: this one is left out
    closing = threading.Thread(target=publisher.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    go.set()
    closing.join(DEADLINE_S)
    assert steps(ctx) == [1]
    publisher.after_step()
    assert steps(ctx) == [1]


def test_what_dead_runs_published_is_swept_and_what_living_ones_did_is_not(
    tmp_path: Path, shared_memory: Path
) -> None:
    ctx, state = make_context(tmp_path), make_state()
    for run_id in ("run_dead", "run_alive"):
        other = dataclasses.replace(ctx, run_dir=RunDir(open_storage(str(tmp_path)), run_id))
        assert publish_snapshot(other, state.state_dict()) is None
    long_ago = time.time() - forgotten.FORGOTTEN_S - 60
    dead = shared_memory / "run_dead"
    for path in (dead, *dead.iterdir()):
        os.utime(path, (long_ago, long_ago))
    sweeping = forgotten.sweep_forgotten(ctx)
    assert sweeping is not None
    sweeping.join(DEADLINE_S)
    assert [path.name for path in shared_memory.iterdir()] == ["run_alive"]


def test_a_state_that_was_published_is_not_left_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, state = make_context(tmp_path), make_state()
    for step in (1, 2):
        advance(state, step)
        assert publish_snapshot(ctx, copy_to_cpu(state.state_dict())) is None
    monkeypatch.setattr(SnapshotStore, "free_bytes", lambda _: 1000)
    assert leave_snapshot(ctx, copy_to_cpu(state.state_dict())) is None, "nothing is to be written"
    assert steps(ctx) == [2]
    advance(state, 3)
    monkeypatch.setattr(SnapshotStore, "free_on_disk", lambda _: 1000)
    assert "does not fit" in str(leave_snapshot(ctx, copy_to_cpu(state.state_dict())))
    elected = elect([Candidate(0, label) for label in snapshot_store(ctx).labels()], 1)
    assert elected.candidate is not None and elected.candidate.label.step == 2
    assert len(elected.rejected) == 1


# ---------------------------------------------------------------- deaths in the middle


@pytest.fixture(scope="module")
def wreckage() -> Iterator[Path]:
    """A directory for each moment of a publication at which the process that published was
    killed."""
    with quick_directory() as directory:
        subprocess.run(
            [sys.executable, "-m", "tests.support.snapshot_crash", directory],
            cwd=ROOT,
            check=True,
            timeout=120,
        )
        yield Path(directory)


@pytest.mark.slow
def test_killed_at_any_moment_of_a_publication_leaves_the_last_whole_one_to_be_elected(
    wreckage: Path,
) -> None:
    places = sorted(path for path in wreckage.iterdir() if path.suffix == ".said")
    assert len(places) > 20
    restored = set()
    for said in places:
        claimed = max((int(line) for line in said.read_text().split()), default=0)
        store = SnapshotStore(said.with_suffix(""), 1)
        for label in store.labels():
            assert digest(store.read(label)) == label.digest, said.name
        candidate = elect([Candidate(0, label) for label in store.labels()], 1).candidate
        elected = candidate.label.step if candidate else 0
        assert elected in (claimed, claimed + 1), (said.name, claimed, elected)
        restored.add((claimed, elected))
        store.remove_after(elected)  # the next attempt clears what was never finished
        names = {path.name.partition(".")[0] for path in said.with_suffix("").glob("*.pt")}
        assert {
            path.name.partition(".")[0] for path in said.with_suffix("").glob("*.*")
        } == names, said.name
        assert not list(said.with_suffix("").glob("*.tmp")), said.name
    assert {(0, 0), (1, 1), (2, 2)} <= restored


def test_killed_in_the_middle_of_writing_a_state(wreckage: Path) -> None:
    """The kernel ends the process at a byte of the third state, which is then there in part."""
    cut = sorted(wreckage.glob("*-bytes"))
    assert len(cut) >= 5
    for place in cut:
        assert [path.stat().st_size for path in place.glob("*.tmp")] == [
            int(place.name.partition("-")[0])
        ]
        store = SnapshotStore(place, 1)
        candidate = elect([Candidate(0, label) for label in store.labels()], 1).candidate
        assert candidate is not None and candidate.label.step == 2
        assert torch.equal(
            store.read(candidate.label)["model"]["weight"], torch.full((64, 64), 2.0)
        )


def test_a_run_of_the_same_id_in_another_directory_meets_no_foreign_snapshot(
    tmp_path: Path,
) -> None:
    ctx = make_context(tmp_path)
    assert leave_snapshot(ctx, copy_to_cpu(make_state().state_dict())) is None
    assert len(snapshot_store(ctx).labels()) == 1
    elsewhere = RunDir(open_storage(str(tmp_path / "elsewhere")), ctx.run_dir.run_id)
    assert snapshot_store(dataclasses.replace(ctx, run_dir=elsewhere)).labels() == []


def test_a_label_that_does_not_fit_leaves_no_state_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared memory that is full would else stay full: nobody finds a state without its label."""
    ctx, state = make_context(tmp_path), make_state()
    advance(state, 3)
    store = snapshot_store(ctx)

    def full(path: Path, text: str) -> int:
        path.touch()
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        problem = publish_snapshot(ctx, copy_to_cpu(state.state_dict()))
    assert problem is not None and "No space left" in problem
    assert list(store.directory.iterdir()) == []
