"""The whole loop of one rank on a storage that takes no checkpoint: paused where the spec asks for
it, and resumed later."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.errors import StorageFull
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.one_rank import journal_of, one_rank
from train_fn.checkpoints import cadence
from train_fn.context import WorkerContext
from train_fn.loop.attempt import train
from train_fn.session import session
from train_fn.snapshots.store import snapshot_store

pytestmark = [pytest.mark.own_process, pytest.mark.slow]

SPEC = {
    "name": "paused",
    "task": {
        "name": "image_classification",
        "model": {"name": "mini_resnet", "args": {"width": 4}},
        "data": {"name": "digits"},
    },
    "train": {
        "max_steps": 160,
        "global_batch_size": 8,
        "micro_batch_size": 8,
        "eval_every_epochs": 100,
    },
    "checkpoint": {"every_steps": 2, "max_failed_saves": 2, "on_failed_saves": "pause"},
}


def attempt(place: Path, number: int) -> tuple[WorkerContext, list[str]]:
    reported: list[str] = []
    ctx = dataclasses.replace(
        one_rank(
            RunSpec.model_validate(SPEC),
            RunDir(open_storage(str(place)), "run_paused"),
            attempt=number,
        ),
        report_checkpoint=lambda name, metrics: reported.append(name),
    )
    return ctx, reported


@pytest.mark.parametrize("node_is_there", [True, False])
def test_ranks_stop_without_a_last_checkpoint_and_go_on_from_their_node_s_state_or_from_the_newest(
    node_is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cadence, "RETRY_S", 0.001)
    monkeypatch.setattr(session, "STOP_PATIENCE_S", 0.01)
    begin = CheckpointStore.begin

    def begin_until_full(store: CheckpointStore, step: int, submission: int, attempt: int) -> Any:
        if step > 2:
            raise StorageFull("no space left")
        return begin(store, step, submission, attempt)

    with monkeypatch.context() as full:
        full.setattr(CheckpointStore, "begin", begin_until_full)
        ctx, reported = attempt(tmp_path, 1)
        assert train(ctx) == "pause"
    journal = journal_of(ctx)
    assert 2 < journal.points[-1]["step"] < 160, "it did not wait for the end"
    assert len(journal.of_kind(EventKind.CHECKPOINT_FAILED)) >= 2
    assert reported in ([], ["step-000000002.s001.a001"]), (
        "a checkpoint that was not committed is not reported"
    )

    if not node_is_there:
        snapshot_store(ctx).remove_all()
    ctx, reported = attempt(tmp_path, 2)
    assert train(ctx) is None
    [restored] = journal_of(ctx).of_kind(EventKind.RESTORED)
    expected = ("snapshot", journal.points[-1]["step"]) if node_is_there else ("checkpoint", 2)
    assert (restored["source"], restored["step"]) == expected
    assert not snapshot_store(ctx).directory.exists(), "of a run that is done nothing stays"
    assert reported[-1] == "step-000000160.s001.a002"
    assert ctx.checkpoints.list()[-1].step == 160
