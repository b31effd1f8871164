"""Ray Train is told of every checkpoint, in order, beside training: a report is a barrier that may
take its time, or fail."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
from pyarrow.fs import LocalFileSystem

from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.storage_places import save
from train_fn.ray_train.ray_checkpoints import CheckpointReports


class SlowRay:
    """Ray Train's side of a report: its context, and a barrier that opens when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, experiment: Path, rank: int) -> None:
        self.open, self.reported, self.error = (
            threading.Semaphore(0),
            list[dict[str, Any]](),
            RuntimeError("the group is ending"),
        )
        storage = SimpleNamespace(
            build_checkpoint_path_from_name=lambda name: f"{experiment}/{name}",
            storage_filesystem=LocalFileSystem(),
        )
        context = SimpleNamespace(get_storage=lambda: storage, get_world_rank=lambda: rank)
        monkeypatch.setattr(ray.train, "get_context", lambda: context)
        monkeypatch.setattr(ray.train, "report", self._report)

    def _report(self, **report: Any) -> None:
        assert self.open.acquire(timeout=60)
        if report["metrics"] == {"fails": 1.0}:
            raise self.error
        self.reported.append(report)


@pytest.mark.parametrize("rank", [0, 1])
def test_reports_hold_nobody_up_and_come_in_order(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(open_storage(str(tmp_path)), "run_r")
    slow = SlowRay(monkeypatch, tmp_path / "runs/run_r", rank)
    counts: list[int] = []
    reports = CheckpointReports(run_dir, lambda: counts.append(len(slow.reported)))
    reports.start()
    names = [save(run_dir, step).name for step in (50, 100, 150)]
    for name, metrics in zip(names, ({"loss": 0.5}, {"fails": 1.0}, {"loss": 0.25}), strict=True):
        reports.add(name, metrics)  # returns although the barrier of the first one is shut
    assert slow.reported == [] and not reports.close(0.01)
    slow.open.release(3)
    assert reports.close(20.0)
    assert [report["checkpoint_dir_name"] for report in slow.reported] == [
        f"checkpoints/{names[0]}",
        f"checkpoints/{names[2]}",
    ]
    assert counts == [1, 2], "of each that can be taken, once it can be"
    assert [report["metrics"] for report in slow.reported] == [{"loss": 0.5}, {"loss": 0.25}]
    for report, name in zip(slow.reported, (names[0], names[2]), strict=True):
        assert report["checkpoint_upload_mode"] is ray.train.CheckpointUploadMode.NO_UPLOAD
        if rank == 0:
            assert Path(report["checkpoint"].path) == Path(CheckpointStore(run_dir).path(name)), (
                "where it lies: nothing is copied"
            )
        else:
            assert report["checkpoint"] is None
