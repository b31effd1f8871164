"""TensorBoard's files, read back by TensorBoard: every step once, whatever died, and restarts as
text."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.logs import event_files
from storage.logs.journal import JournalEvent
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from tests.support.storage_places import memory_run_dir
from train_fn.journal.tensorboard_files import RESTARTS_TAG, TensorBoardFiles

AT = 1_780_000_000.0


class Submission:
    """A journal that grows."""

    def __init__(self, run_dir: RunDir, number: int) -> None:
        self._writer = JournalWriter(run_dir, number)
        self._number = number
        self._n = 0

    def tell(self, kind: EventKind, **data: Any) -> None:
        self._n += 1
        at = AT + 100 * self._number + self._n
        self._writer.append(
            [
                JournalEvent(
                    kind=kind,
                    at=at,
                    submission=self._number,
                    data=data,
                    source="driver",
                    source_n=self._n,
                )
            ]
        )

    def steps(self, *steps: int) -> None:
        points = [
            {"step": step, "at": AT + step, "values": {"loss": 1 / step, "lr": 0.1, "bad": None}}
            for step in steps
        ]
        self.tell(EventKind.METRICS, points=points)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(open_storage(str(tmp_path)), "run_t")


def read(
    directory: Path,
) -> tuple[Counter[tuple[str, int]], dict[str, list[tuple[int, float]]], list[tuple[int, str]]]:
    """How often each series has each step in the raw files, the scalars as TensorBoard shows them,
    and the texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    raw: Counter[tuple[str, int]] = Counter()
    for path in sorted(directory.iterdir()):
        for event in EventFileLoader(str(path)).Load():
            raw.update((value.tag, event.step) for value in event.summary.value)
    shown = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = [tag for tag in shown.Tags()["tensors"] if tag != RESTARTS_TAG]
    scalars = {
        tag: [(e.step, float(tensor_util.make_ndarray(e.tensor_proto))) for e in shown.Tensors(tag)]
        for tag in tags
    }
    scalars |= {
        tag: [(e.step, e.value) for e in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]
    }
    texts = shown.Tensors(RESTARTS_TAG) if RESTARTS_TAG in shown.Tags()["tensors"] else []
    return (
        raw,
        scalars,
        [(e.step, tensor_util.make_ndarray(e.tensor_proto)[0].decode()) for e in texts],
    )


def directory_of(run_dir: RunDir) -> Path:
    return Path(run_dir.files.path(run_dir.tensorboard_path("")))


def test_steps_that_are_done_again_are_there_once_and_restarts_are_told(run_dir: RunDir) -> None:
    first = Submission(run_dir, 1)
    writer = TensorBoardFiles(run_dir, 1)
    first.tell(EventKind.SUBMISSION_STARTED)
    first.steps(1, 2, 3)
    writer.update()
    first.steps(4, 5)
    first.tell(EventKind.EVALUATED, step=5, epoch=0, metrics={"accuracy": 0.5})
    first.tell(
        EventKind.FAILURE, verdict="worker_lost", first_rank=1, node_id="n", step=5, exception=None
    )
    first.tell(
        EventKind.RECOVERED, recovery_s=1.5, steps_lost=2, world_size_before=2, world_size_after=1
    )
    first.steps(4, 5, 6)
    writer.update()
    first.steps(7)  # told, and then driver and writer died
    second = Submission(run_dir, 2)
    second.tell(EventKind.SUBMISSION_STARTED)
    later = TensorBoardFiles(run_dir, 2)
    second.steps(6, 7, 8)
    second.tell(EventKind.EVALUATED, step=8, epoch=1, metrics={"accuracy": 0.75})
    second.tell(
        EventKind.FINISHED,
        outcome="failed",
        reason={"code": "no_progress", "message": "three failures"},
        step=8,
    )
    later.update()
    later.update()
    raw, scalars, texts = read(directory_of(run_dir))
    assert max(raw.values()) == 1, "no step twice"
    assert scalars["loss"] == [(step, pytest.approx(1 / step)) for step in range(1, 9)]
    assert scalars["val_accuracy"] == [(5, 0.5), (8, 0.75)] and "bad" not in scalars
    assert [step for step, _ in texts] == [5, 8]
    assert "Attempt 0 failed at step 5" in texts[0][1] and "with 1 ranks" in texts[0][1]
    assert "(before: 2), 2 steps lost." in texts[0][1]
    assert "three failures" in texts[1][1]
    assert len(list(directory_of(run_dir).iterdir())) == 2


@pytest.mark.parametrize("torn_bytes", [0, 1, 20, 100])
def test_a_file_that_a_dead_driver_left_torn_is_completed(run_dir: RunDir, torn_bytes: int) -> None:
    journal = Submission(run_dir, 1)
    journal.steps(*range(1, 50))
    TensorBoardFiles(run_dir, 1).update()
    [path] = directory_of(run_dir).iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - torn_bytes])
    Submission(run_dir, 2).tell(EventKind.SUBMISSION_STARTED)
    TensorBoardFiles(run_dir, 2).update()
    assert path.read_bytes() == whole


def test_an_object_store_holds_a_row_of_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_files, "PART_BYTES", 600)
    run_dir, files = memory_run_dir()
    journal = Submission(run_dir, 1)
    writer = TensorBoardFiles(run_dir, 1)
    for begin in range(1, 41, 8):
        journal.steps(*range(begin, begin + 8))
        files.fail_next_write = None
        writer.update()
    parts = {name: data for name, data in files.objects.items() if "/tensorboard/" in name}
    assert len(parts) > 3 and all(len(data) < 900 for data in parts.values())
    journal.steps(41, 42)
    Submission(run_dir, 2).steps(42, 43)
    TensorBoardFiles(run_dir, 2).update()
    for name, data in files.objects.items():
        if "/tensorboard/" in name:
            (tmp_path / name.rsplit("/", 1)[1]).write_bytes(data)
            assert parts.get(name) is None or data.startswith(parts[name]), (
                "what was there stays as it was"
            )
    raw, scalars, _ = read(tmp_path)
    assert max(raw.values()) == 1 and [step for step, _ in scalars["loss"]] == list(range(1, 44))


def test_closing_writes_the_rest_and_ends_the_thread(run_dir: RunDir) -> None:
    journal = Submission(run_dir, 1)
    writer = TensorBoardFiles(run_dir, 1)
    writer.start()
    journal.steps(1, 2)
    writer.close(20)
    assert "tensorboard" not in [thread.name for thread in threading.enumerate()]
    assert [step for step, _ in read(directory_of(run_dir))[1]["loss"]] == [1, 2]
