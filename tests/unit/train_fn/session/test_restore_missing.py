"""A storage that has lost checkpoints, or does not list them for a moment: a run goes back as far
as it must, says so, and never quietly begins again."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.retention import reported_checkpoints
from storage.checkpoints.store import CheckpointStore
from storage.errors import StorageUnavailable
from storage.files.local import LocalFiles
from storage.filesystem import open_storage
from storage.logs.journal import JournalEvent, read_journal
from storage.run_dir import CheckpointName, RunDir
from tests.support.one_rank import one_rank, small_task_alone
from tests.support.raw_specs import TASK
from tests.support.storage_places import quick_directory
from train_fn.checkpoints.saver import Saver
from train_fn.journal.server import open_local_journal
from train_fn.loop.attempt import train
from train_fn.recovery.evidence import StepFailed

pytestmark = pytest.mark.own_process

STEPS_PER_ATTEMPT = 8
NAMES = [f"step-{step:09d}.s001.a001" for step in (4, 8)]


def save_each(self: Saver, *, due: bool, is_best: bool) -> None:
    if due:
        self.save_now()


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One rank, a small task, shared memory of its own, and saves that are not merged."""
    with small_task_alone(tmp_path_factory.mktemp("shm"), save_each):
        yield


def spec(max_steps: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "missing",
            "task": TASK,
            "train": {
                "epochs": 9,
                "max_steps": max_steps,
                "global_batch_size": 10,
                "micro_batch_size": 10,
                "loader": {"num_workers": 0},
            },
            "checkpoint": {"every_steps": 4, "keep_latest": 9},
        }
    )


def attempt(run_dir: RunDir, number: int, submission: int = 1) -> None:
    """Train to a later step, with a journal that is written as a run's is."""
    journal = open_local_journal(
        run_dir, submission, number, 0, threading.Event(), lambda line: None
    )
    ctx = one_rank(spec(STEPS_PER_ATTEMPT * number), run_dir, submission=submission, attempt=number)
    try:
        train(replace(ctx, journal=journal))
    finally:
        journal.close(10.0)


def restored(run_dir: RunDir, submission: int = 1) -> list[dict[str, Any]]:
    events: list[JournalEvent] = read_journal(run_dir, submission, kinds=[EventKind.RESTORED])[0]
    return [event.data for event in events]


@pytest.fixture
def run_dir() -> Iterator[RunDir]:
    """A run whose first attempt ended at step 8, with checkpoints of steps 4 and 8."""
    with quick_directory() as directory:
        found = RunDir(open_storage(directory), "run_missing")
        attempt(found, 1)
        assert [manifest.name for manifest in CheckpointStore(found).list()] == NAMES
        yield found


def checkpoints_of(run_dir: RunDir) -> Path:
    return Path(run_dir.files.path(run_dir.checkpoints_path()))


@pytest.mark.parametrize("submission", [1, 2])
@pytest.mark.parametrize("what", ["manifest.json", "model.pt", "."])
def test_a_checkpoint_that_is_gone_is_named_and_the_one_before_taken(
    run_dir: RunDir, what: str, submission: int
) -> None:
    path = checkpoints_of(run_dir) / NAMES[1] / what
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    attempt(run_dir, 2, submission)
    last = restored(run_dir, submission)[-1]
    assert (last["source"], last["step"], last["checkpoint"]) == ("checkpoint", 4, NAMES[0])
    assert [bad["name"] for bad in last["rejected"]] == [NAMES[1]]
    assert CheckpointStore(run_dir).list()[-1].step == 16


@pytest.mark.parametrize("shown", [[], NAMES[:1]])
def test_a_listing_that_shows_too_little_sends_no_run_back(
    run_dir: RunDir, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = LocalFiles.list

    def list_too_little(files: LocalFiles, relpath: str) -> Any:
        found = listed(files, relpath)
        return (
            [entry for entry in found if entry.name in shown]
            if relpath == run_dir.checkpoints_path()
            else found
        )

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "list", list_too_little)
        attempt(run_dir, 2)
    last = restored(run_dir)[-1]
    assert (last["source"], last["step"], last["rejected"]) == ("checkpoint", 8, [])


def test_a_run_whose_checkpoints_are_all_gone_waits_for_them(run_dir: RunDir) -> None:
    place = checkpoints_of(run_dir)
    elsewhere = place.with_name("elsewhere")
    place.rename(elsewhere)
    with pytest.raises(StepFailed) as caught:
        attempt(run_dir, 2)
    assert (
        caught.value.error.type == StorageUnavailable.__name__
        and NAMES[1] in caught.value.error.message
    )
    assert len(restored(run_dir)) == 1, "no attempt began again"
    elsewhere.rename(place)
    attempt(run_dir, 3)
    assert restored(run_dir)[-1]["step"] == 8


def test_a_listing_that_fails_fails_the_attempt(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = LocalFiles.list

    def list_failing(files: LocalFiles, relpath: str) -> Any:
        if relpath == run_dir.checkpoints_path():
            raise StorageUnavailable("the network is away")
        return listed(files, relpath)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "list", list_failing)
        with pytest.raises(StepFailed, match="the network is away"):
            attempt(run_dir, 2)
    assert len(restored(run_dir)) == 1


def test_the_journals_tell_what_is_to_be_there(run_dir: RunDir) -> None:
    """What retention deleted is not missed."""
    assert reported_checkpoints(run_dir) == {CheckpointName(4, 1, 1), CheckpointName(8, 1, 1)}
    journal = open_local_journal(run_dir, 2, 2, 0, threading.Event(), lambda line: None)
    journal.emit(EventKind.CHECKPOINT_DELETED, {"step": 4, "name": NAMES[0]})
    journal.emit(EventKind.METRICS, {"points": []})
    journal.close(10.0)
    assert reported_checkpoints(run_dir) == {CheckpointName(8, 1, 1)}
