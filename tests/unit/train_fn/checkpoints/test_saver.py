"""The saver: commits while training goes on, merges what comes too fast, and survives a storage
that fails."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from everstep.wire.events import EventKind
from storage.run_dir import CheckpointName
from tests.support.one_rank import journal_of
from tests.support.saves import (
    CountedCopies,
    SlowStorage,
    advance,
    make_context,
    make_state,
    train_step,
    weight_in,
)
from tests.support.storage_places import quick_directory
from train_fn.checkpoints import saver as saver_module
from train_fn.checkpoints.commit import load_checkpoint
from train_fn.checkpoints.save_slot import BoundaryCopies, BoundaryCopy, Save, SaveSlot
from train_fn.checkpoints.saver import Saver
from train_fn.samples.ledger import Count
from train_fn.state.optim import unpacked
from train_fn.state.run_state import BestSoFar
from train_fn.state.tensor_tree import size_bytes, take_apart

pytestmark = pytest.mark.own_process


@pytest.fixture
def place() -> Iterator[Path]:
    """For tests that save much."""
    with quick_directory() as directory:
        yield Path(directory)


def test_saves_that_come_too_fast_are_merged_but_the_best_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, state, slow = make_context(tmp_path, keep_latest=9), make_state(), SlowStorage(monkeypatch)
    saver = Saver(ctx, state, BoundaryCopies(state))
    assert train_step(saver, state, 10)
    assert slow.begun.acquire(timeout=60)  # under way
    assert not any(train_step(saver, state, step) for step in range(11, 35)), (
        "20 and 30 wait until 10 is written"
    )
    train_step(saver, state, 35, is_best=True)
    assert not train_step(saver, state, 40)
    slow.go.release(9)
    saver.wait_idle(time.monotonic() + 60)
    assert train_step(saver, state, 43), "what was merged is made up for at the first step that can"
    saver.wait_idle(time.monotonic() + 60)
    assert not train_step(saver, state, 44)
    assert train_step(saver, state, 50)
    saver.save_now()
    assert journal_of(ctx).steps(EventKind.CHECKPOINT_COMMITTED) == [10, 35, 43, 50]
    assert [weight_in(ctx, manifest.name) for manifest in ctx.checkpoints.list()] == [
        10,
        35,
        43,
        50,
    ]
    saver.close()


def test_a_best_state_that_waits_makes_room_for_another_best_one_alone() -> None:
    slot = SaveSlot(threading.RLock(), lambda copy: None)
    slot.put(Save(BoundaryCopy(1, 0, {}, 0.0), is_best=True, best=None, retry_until=0.0))
    assert not slot.make_room(for_best=False) and slot.waiting is not None
    assert slot.make_room(for_best=True) and slot.waiting is None


def test_ranks_hear_of_the_newest_checkpoint_seldom_and_each_names_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, state = make_context(tmp_path, keep_latest=9), make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    reported = 0
    for step in (10, 20, 30, 40):
        monkeypatch.setattr(saver_module, "REPORT_EVERY_S", 0.0 if step == 40 else 3600.0)
        train_step(saver, state, step)
        assert saver.wait_idle(time.monotonic() + 60)
        newest = saver.newest_to_report(reported)
        assert newest == {10: 10, 20: 0, 30: 0, 40: 40}[step]
        reported = newest or reported
    assert saver.newest_to_report(reported) == 0 == saver.newest_committed(reported), (
        "what was told is no news"
    )
    names = [str(CheckpointName(step, 1, 1)) for step in (10, 20, 30, 40)]
    assert [manifest.parent for manifest in ctx.checkpoints.list()] == [None, *names[:-1]]
    saver.close()


MOST = 128
"""Values repeat after so many steps: a number of eight bits has no more."""


class Rebinding(torch.optim.SGD):
    """Has no moments at first, makes new ones at every step later, and changes a list in place."""

    @torch.no_grad()
    def advance(self, value: int, *, moments: bool) -> None:
        self.param_groups[0]["lr"] = float(value)
        for parameter in self.param_groups[0]["params"]:
            if moments:
                self.state[parameter]["moment"] = torch.full_like(parameter, value)
            history = self.state[parameter].setdefault("history", [])
            history[:] = [value] * 5


def awkward_model() -> nn.Module:
    """Tied weights, weights that are not contiguous, views of one storage, buffers of other dtypes
    and of no size."""
    model = nn.Module()
    model.conv = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.embedding, model.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
    model.head.weight = model.embedding.weight
    model.norm = nn.BatchNorm1d(4)
    both = torch.zeros(2, 1000)
    model.register_buffer("upper", both[0])
    model.register_buffer("lower", both.t()[:, 1])
    model.register_buffer("wide", torch.zeros(1).expand(300))
    model.register_buffer("low_precision", torch.zeros(500, dtype=torch.bfloat16))
    model.register_buffer("nothing", torch.zeros(0, 3))
    return model


def test_whatever_a_state_is_made_of_a_save_is_of_its_step(place: Path) -> None:
    """Weights, buffers, moments, rates, counters, metrics and ledger are of one moment, however
    torch and its users keep them."""
    ctx = make_context(place, every_steps=1, keep_latest=10_000)
    model = awkward_model()
    optimizer = Rebinding(model.parameters(), lr=0.1)
    state = make_state(model, optimizer, steps_per_epoch=7)
    copies = CountedCopies(state)
    saver = Saver(ctx, state, copies)
    step = 0
    deadline = time.monotonic() + 60
    while len(journal_of(ctx).steps(EventKind.CHECKPOINT_COMMITTED)) < 12:
        assert time.monotonic() < deadline
        due = saver.is_due()
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                (tensor[:1] if tensor.stride() == (0,) else tensor).fill_(step % MOST + 1)
        optimizer.advance(step % MOST + 1, moments=step >= 3)
        state.ledger.commit(step, Count(5, 0, 0, step))
        step = state.step = step + 1
        state.metrics["accuracy"], state.evaluated_step = float(step), step
        state.best = BestSoFar("accuracy", float(step), step, "")
        saver.save_if_due(due=due or step == 1, is_best=False)
    saver.close()
    committed = ctx.checkpoints.list()
    assert committed[0].step == 1 and 4 < len(committed) < step and copies.most_held == 1, (
        "saves overlapped with steps"
    )
    for manifest in committed:
        saved = load_checkpoint(ctx.run_dir, manifest)
        number = (manifest.step - 1) % MOST + 1
        tensors: list[torch.Tensor] = []
        take_apart(saved, tensors)
        assert len(tensors) == len(model.state_dict()) + (
            len(list(model.parameters())) if manifest.step > 3 else 0
        )
        assert all(bool((tensor == number).all()) for tensor in tensors), manifest.name
        assert saved["optimizer"]["param_groups"][0]["lr"] == number
        assert all(
            entry["history"] == [number] * 5
            for entry in unpacked(saved["optimizer"])["state"].values()
        )
        assert (saved["step"], saved["ledger"]["samples"], saved["evaluated_step"]) == (
            manifest.step,
            5 * manifest.step,
            manifest.step,
        )
        assert (
            saved["metrics"] == manifest.metrics == {"accuracy": manifest.step}
            and saved["best"]["step"] == manifest.step
        )
        assert manifest.sample_digest == saved["ledger"]["chain"]


def test_retention_keeps_the_latest_and_the_best(tmp_path: Path) -> None:
    ctx, state = make_context(tmp_path), make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    for step in (10, 20, 30, 40, 50):
        advance(state, step)
        if step == 20:
            state.best = BestSoFar("val_accuracy", 0.9, 20, "step-000000020.s001.a001")
        saver.save_now(is_best=step == 20)
    assert [manifest.step for manifest in ctx.checkpoints.list()] == [20, 40, 50]
    assert journal_of(ctx).steps(EventKind.CHECKPOINT_DELETED) == [10, 30]
    saver.close()


@pytest.mark.parametrize("is_best", [True, False])
def test_the_best_state_is_known_to_be_unsaved_until_it_is_written(
    is_best: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, state = make_context(tmp_path), make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    may_write, write = threading.Event(), saver._committer.commit

    def commit(save: Save) -> Any:
        assert may_write.wait(60)
        return write(save)

    monkeypatch.setattr(saver._committer, "commit", commit)
    advance(state, 10)
    saver.save_if_due(due=True, is_best=is_best)
    assert saver.has_best_to_write is is_best
    may_write.set()
    assert saver.wait_idle(time.monotonic() + 60)
    assert not saver.has_best_to_write
    saver.close()


def test_other_ranks_save_nothing(tmp_path: Path) -> None:
    ctx, state = make_context(tmp_path, rank=1), make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    advance(state, 10)
    assert not saver.is_due()
    saver.save_if_due(due=True, is_best=True)
    saver.save_now()
    saver.close()
    assert ctx.checkpoints.list() == []


@pytest.mark.slow
@pytest.mark.parametrize("num_saves", [60, pytest.param(1000, marks=pytest.mark.chaos)])
def test_saves_leave_nothing_behind_in_memory(num_saves: int, place: Path) -> None:
    """Memory does not grow, Python's objects do not grow in number, and no thread or open file is
    left of a save."""
    ctx = make_context(place, every_steps=1, keep_latest=1)
    ctx.journal.emit = lambda kind, data: None  # type: ignore[method-assign]
    model = nn.Linear(512, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    state = make_state(model, optimizer)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    saver = Saver(ctx, state, BoundaryCopies(state))
    process = psutil.Process()

    def save_all(first: int, last: int) -> tuple[int, int, int, int]:
        for step in range(first, last):
            advance(state, step)
            saver.save_now()
        gc.collect()
        return (
            process.memory_info().rss,
            len(gc.get_objects()),
            threading.active_count(),
            process.num_fds(),
        )

    warm = save_all(1, 20)
    resident, objects, threads, files = save_all(20, 20 + num_saves)
    copy_bytes = size_bytes(state.state_dict())
    assert resident - warm[0] < min(num_saves * copy_bytes / 4, 32e6), (
        "less than a quarter of the state for each save"
    )
    assert objects - warm[1] < num_saves, "less than one object for each save"
    assert (threads, files) == warm[2:]
    saver.close()
