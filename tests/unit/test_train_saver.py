"""The saver: commits while training goes on, merges what comes too fast, and survives a storage that fails."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.events import EventKind
from everstep.spec import RunSpec
from storage.checkpoints import CheckpointStore
from storage.errors import StorageFull
from storage.filesystem import open_storage
from train_fn import saver as saver_module
from train_fn.boundary_copy import BoundaryCopies
from train_fn.context import Stop, WorkerContext
from train_fn.errors import CheckpointFailed
from train_fn.saver import Saver
from train_fn.state import Best, TrainState


class Journal:
    stop_requested: Stop | None = None

    def __init__(self) -> None:
        self.events: list[tuple[EventKind, dict[str, Any]]] = []

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        self.events.append((kind, data))

    def flush(self, timeout_s: float) -> bool:
        return True

    def steps(self, kind: EventKind) -> list[int]:
        return [data["step"] for found, data in self.events if found is kind]


def make_context(tmp_path: Path, rank: int = 0, **checkpoint: Any) -> WorkerContext:
    spec = RunSpec.model_validate(
        {
            "name": "saver",
            "task": {"name": "image_classification", "model": {"name": "mini_resnet"}, "data": {"name": "digits"}},
            "checkpoint": {"every_steps": 10, "keep_latest": 2, **checkpoint},
        }
    )
    return WorkerContext(
        spec=spec,
        run_dir=open_storage(str(tmp_path)).run_dir("run_saver"),
        submission=1,
        attempt=1,
        world_rank=rank,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_id="node",
        num_nodes=1,
        device=torch.device("cpu"),
        journal=Journal(),
        report_checkpoint=lambda name, metrics: None,
    )


def make_state() -> TrainState:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    return TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), None, steps_per_epoch=100, fingerprint="data")


def advance(state: TrainState, step: int) -> None:
    state.step = step
    with torch.no_grad():
        state.model.weight.fill_(step)  # type: ignore[union-attr]


def weight_in(ctx: WorkerContext, name: str) -> float:
    model = torch.load(io.BytesIO(ctx.run_dir.checkpoints.read_file(name, "model.pt")), weights_only=True)
    return float(model["weight"][0, 0])


class SlowStorage:
    """Holds every checkpoint until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)
        begin = CheckpointStore.begin

        def begin_slowly(store: CheckpointStore, step: int, submission: int) -> Any:
            self.begun.release()
            assert self.go.acquire(timeout=10)
            return begin(store, step, submission)

        monkeypatch.setattr(CheckpointStore, "begin", begin_slowly)


def test_a_checkpoint_holds_the_state_at_the_boundary_not_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, state, slow = make_context(tmp_path), make_state(), SlowStorage(monkeypatch)
    saver = Saver(ctx, state, BoundaryCopies(state))
    advance(state, 10)
    saver.offer(is_best=False)
    assert slow.begun.acquire(timeout=10)
    advance(state, 11)  # training goes on while the storage is slow
    slow.go.release(2)
    saver.save_now()
    assert weight_in(ctx, "step-000000010.s001") == 10
    assert weight_in(ctx, "step-000000011.s001") == 11
    saver.close()


def test_saves_that_come_too_fast_are_merged_but_the_best_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, state, slow = make_context(tmp_path, keep_latest=9), make_state(), SlowStorage(monkeypatch)
    saver = Saver(ctx, state, BoundaryCopies(state))
    for step, is_best in [(10, False), (20, False), (30, False), (35, True), (40, False)]:
        advance(state, step)
        saver.offer(is_best=is_best)
        if step == 10:
            assert slow.begun.acquire(timeout=10)  # under way; the others wait for it
    slow.go.release(9)
    saver.save_now()
    assert ctx.journal.steps(EventKind.CHECKPOINT_COMMITTED) == [10, 35, 40]  # type: ignore[attr-defined]
    assert [weight_in(ctx, manifest.name) for manifest in ctx.run_dir.checkpoints.list()] == [10, 35, 40]
    saver.close()


def test_retention_keeps_the_latest_and_the_best(tmp_path: Path) -> None:
    ctx, state = make_context(tmp_path), make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    for step in (10, 20, 30, 40, 50):
        advance(state, step)
        if step == 20:
            state.best = Best("val_accuracy", 0.9, 20, "step-000000020.s001")
        saver.save_now(is_best=step == 20)
    assert [manifest.step for manifest in ctx.run_dir.checkpoints.list()] == [20, 40, 50]
    assert ctx.journal.steps(EventKind.CHECKPOINT_DELETED) == [10, 30]  # type: ignore[attr-defined]
    saver.close()


def test_a_failed_save_is_reported_and_the_next_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, state = make_context(tmp_path), make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    begin, failures = CheckpointStore.begin, [StorageFull("no space left; free some")]

    def fail_once(store: CheckpointStore, step: int, submission: int) -> Any:
        if failures:
            raise failures.pop()
        return begin(store, step, submission)

    monkeypatch.setattr(CheckpointStore, "begin", fail_once)
    advance(state, 10)
    saver.offer(is_best=False)
    advance(state, 20)
    saver.save_now()
    assert ctx.journal.events[0] == (EventKind.CHECKPOINT_FAILED, {"step": 10, "error": "StorageFull: no space left; free some"})  # type: ignore[attr-defined]
    assert [manifest.step for manifest in ctx.run_dir.checkpoints.list()] == [20]
    assert saver.newest_committed(0) == 20
    assert saver.newest_committed(20) == 0
    saver.close()


def test_the_final_checkpoint_must_be_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, state = make_context(tmp_path), make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    monkeypatch.setattr(saver_module, "RETRY_S", 0.0)

    def fail(*_: Any) -> Any:
        raise StorageFull("no space left")

    monkeypatch.setattr(CheckpointStore, "begin", fail)
    with pytest.raises(CheckpointFailed, match="step 0 could not be committed in 3 tries: no space left"):
        saver.save_now()
    assert len(ctx.journal.steps(EventKind.CHECKPOINT_FAILED)) == 3  # type: ignore[attr-defined]
    saver.close()


def test_time_makes_a_checkpoint_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(saver_module.time, "monotonic", lambda: now[0])
    ctx, state = make_context(tmp_path, every_steps=None, every_s=5.0), make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    assert not saver._is_due()
    now[0] += 5
    assert saver._is_due()
    monkeypatch.undo()
    saver.close()


def test_what_was_committed_before_is_not_written_again(tmp_path: Path) -> None:
    ctx, state = make_context(tmp_path), make_state()
    for _ in range(2):  # the second is the next attempt, at the same step
        saver = Saver(ctx, state, BoundaryCopies(state))
        saver.save_now()
        saver.close()
    assert ctx.journal.steps(EventKind.CHECKPOINT_COMMITTED) == [0]  # type: ignore[attr-defined]


def test_other_ranks_save_nothing(tmp_path: Path) -> None:
    ctx, state = make_context(tmp_path, rank=1), make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    advance(state, 10)
    saver.offer(is_best=True)
    saver.save_now()
    saver.close()
    assert ctx.run_dir.checkpoints.list() == []
