"""The commit of a checkpoint: what earlier attempts, other processes and lost answers leave is told
from what this attempt writes."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.wire.events import EventKind
from storage import claims
from storage.checkpoints import writer as checkpoint_writer
from storage.claims import claim_attempt
from tests.support.one_rank import journal_of, one_rank
from tests.support.saves import (
    advance,
    make_context,
    make_state,
    weight_in,
)
from tests.support.storage_places import record_restored, save
from train_fn.checkpoints.save_slot import BoundaryCopies
from train_fn.checkpoints.saver import Saver
from train_fn.context import WorkerContext
from train_fn.errors import CheckpointFailed
from train_fn.journal.server import open_local_journal

pytestmark = pytest.mark.own_process


def make_durable(ctx: WorkerContext, committed: list[dict[str, Any]]) -> None:
    """What was told of these checkpoints, and nothing else, is in the run's journal."""
    journal = open_local_journal(ctx.run_dir, 1, 1, 0, threading.Event(), lambda line: None)
    for data in committed:
        journal.emit(EventKind.CHECKPOINT_COMMITTED, data)
    journal.close(10.0)


def test_what_an_attempt_did_before_it_died_is_told_by_the_next(tmp_path: Path) -> None:
    """Of its four checkpoints two were deleted; neither that nor the third one's commit has become
    durable."""
    ctx, state = make_context(tmp_path), make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    for step in (10, 20, 30, 40):
        advance(state, step)
        saver.save_now()
    saver.close()
    reported = journal_of(ctx).of_kind(EventKind.CHECKPOINT_COMMITTED)
    make_durable(ctx, [data for data in reported if data["step"] != 30])
    ctx = one_rank(ctx.spec, ctx.run_dir, attempt=2)
    saver = Saver(ctx, state, BoundaryCopies(state))
    for step in (50, 60):
        advance(state, step)
        saver.save_now()
    saver.close()
    kinds = (EventKind.CHECKPOINT_COMMITTED, EventKind.CHECKPOINT_DELETED)
    assert [(kind, data["step"]) for kind, data in journal_of(ctx).events if kind in kinds] == [
        (EventKind.CHECKPOINT_COMMITTED, 30),
        (EventKind.CHECKPOINT_DELETED, 10),
        (EventKind.CHECKPOINT_DELETED, 20),
        (EventKind.CHECKPOINT_COMMITTED, 50),
        (EventKind.CHECKPOINT_DELETED, 30),
        (EventKind.CHECKPOINT_COMMITTED, 60),
        (EventKind.CHECKPOINT_DELETED, 40),
    ]


@pytest.mark.parametrize("is_told", [True, False])
def test_what_was_committed_before_is_not_written_again_but_told_where_nobody_was(
    tmp_path: Path, is_told: bool
) -> None:
    """The state of the run's last checkpoint: there is no later one to tell of it with."""
    ctx, state = make_context(tmp_path), make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    saver.save_now()
    saver.close()
    [committed] = journal_of(ctx).of_kind(EventKind.CHECKPOINT_COMMITTED)
    make_durable(ctx, [committed] if is_told else [])
    [manifest] = ctx.checkpoints.list()
    ctx = one_rank(ctx.spec, ctx.run_dir, attempt=2)
    again = Saver(ctx, state, BoundaryCopies(state))
    again.save_now()
    again.close()
    assert ctx.checkpoints.list() == [manifest]
    reported = journal_of(ctx).of_kind(EventKind.CHECKPOINT_COMMITTED)
    assert [(data["name"], data["digest"]) for data in reported] == (
        [] if is_told else [(manifest.name, manifest.digest)]
    )


def test_a_state_that_was_evaluated_since_it_was_read_is_saved(tmp_path: Path) -> None:
    ctx, state = make_context(tmp_path), make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    advance(state, 10)
    saver.save_now()
    saver.close()
    ctx = one_rank(ctx.spec, ctx.run_dir, attempt=2)
    again = Saver(ctx, state, BoundaryCopies(state))
    state.metrics, state.evaluated_step = {"val_accuracy": 0.5}, 10
    again.save_now()
    again.close()
    assert [(found.attempt, found.metrics) for found in ctx.checkpoints.list()] == [
        (1, {}),
        (2, {"val_accuracy": 0.5}),
    ]


def as_attempts(ctx: WorkerContext, weights: tuple[float, float]) -> list[Saver]:
    """Ranks zero of attempts 1 and 2 of one submission, both alive, of which the second one's
    losses differed a little."""
    savers = []
    for attempt, weight in zip((1, 2), weights, strict=True):
        state = make_state()
        advance(state, 60)
        with torch.no_grad():
            state.model.weight.fill_(weight)  # type: ignore[union-attr]
        savers.append(
            Saver(one_rank(ctx.spec, ctx.run_dir, attempt=attempt), state, BoundaryCopies(state))
        )
    return savers


def test_no_attempt_takes_another_one_s_checkpoint_for_its_own(tmp_path: Path) -> None:
    """What made a run end with weights that it had not trained."""
    ctx = make_context(tmp_path)
    older, newer = as_attempts(ctx, (1.0, 1.001))
    record_restored(ctx.run_dir, 1, 0, "fresh", attempt=1)
    record_restored(ctx.run_dir, 1, 50, "snapshot", attempt=2)
    older.save_now()
    newer.save_now()
    for saver in (older, newer):
        saver.close()
    newest, _ = ctx.checkpoints.newest_valid()
    assert newest is not None and newest.attempt == 2
    assert weight_in(ctx, newest.name) == pytest.approx(1.001)


def test_a_rank_that_does_not_hear_the_journal_commits_by_the_storage_s_word_and_deletes_nothing(
    tmp_path: Path,
) -> None:
    """Cut off from the head alone. While nobody has taken over checkpoints go on; once somebody
    has, none does."""
    ctx = make_context(tmp_path, keep_latest=1)
    replaced: list[str] = []
    ctx = dataclasses.replace(ctx, holds_lease=lambda timeout_s: False, on_replaced=replaced.append)
    record_restored(ctx.run_dir, 1, 0, "fresh", attempt=1)
    claim_attempt(ctx.run_dir, (1, 1))
    state = make_state()
    saver = Saver(ctx, state, BoundaryCopies(state))
    for step in (10, 20):
        advance(state, step)
        saver.save_now()
    assert [manifest.step for manifest in ctx.checkpoints.list()] == [10, 20], (
        "which of them is needed is not known"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "process_nonce", lambda: "the second attempt's")
        claim_attempt(ctx.run_dir, (1, 2))
    advance(state, 30)
    with pytest.raises(
        CheckpointFailed, match="attempt 2 of run run_saver has taken over from attempt 1"
    ):
        saver.save_now(patience_s=60)
    saver.close()
    assert set(replaced) == {"attempt 2 of run run_saver has taken over from attempt 1"}
    assert [manifest.step for manifest in ctx.checkpoints.list()] == [10, 20]
    assert not [
        entry
        for entry in ctx.run_dir.files.list(ctx.run_dir.checkpoints_path())
        if entry.name.startswith(".")
    ]


def test_no_process_takes_another_one_s_checkpoint_of_the_same_attempt_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = make_context(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "process_nonce", lambda: "another process")
        save(ctx.run_dir, 60)
    saver, _ = as_attempts(ctx, (1.0, 1.0))
    with pytest.raises(CheckpointFailed, match="is already committed"):
        saver.save_now(patience_s=60)
    saver.close()
