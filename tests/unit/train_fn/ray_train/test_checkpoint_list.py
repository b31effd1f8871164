"""Ray Train's list of checkpoints is put right, or removed, where Ray would refuse to start on it,
and only there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest
import ray
import ray.train
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

from storage.filesystem import open_storage
from storage.run_dir import CheckpointName, RunDir
from train_fn.ray_train.ray_checkpoints import ListTrimmer, repair_snapshot_file

# Ray's
pytestmark = [
    pytest.mark.filterwarnings("ignore:The `(json|parse_obj)` method is deprecated"),
    pytest.mark.slow,
]

NAME = "checkpoints/step-000000010.s001.a001"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(open_storage(str(tmp_path)), "run_r")
    run_dir.files.write(f"runs/run_r/{NAME}/manifest.json", b"{}")
    return run_dir


def state(name: str = NAME, version: str = ray.__version__) -> bytes:
    return json.dumps(
        {
            "ray_version": version,
            "checkpoint_results": [{"checkpoint_dir_name": name, "metrics": {}}],
        }
    ).encode()


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (state(), True),
        (state("checkpoints/step-000000099.s001.a001"), False),
        (state(version="2.59.0"), False),
        (state()[:-9], False),
        (b"", False),
        (b"[]", False),
        (None, False),
    ],
)
def test_only_a_list_that_ray_can_load_is_kept(
    run_dir: RunDir, content: bytes | None, kept: bool
) -> None:
    path = "runs/run_r/checkpoint_manager_snapshot.json"
    if content is not None:
        run_dir.files.write(path, content)
    repair_snapshot_file(run_dir)
    assert run_dir.files.exists(path) is kept


class Reported:
    """Ray's own list of a run whose retention deletes all checkpoints but some."""

    def __init__(self, root: Path, kept: Collection[int], keep_latest: int) -> None:
        self.run_dir = RunDir(open_storage(str(root)), "run_r")
        self.manager = self.opened()
        self.short = ListTrimmer(self.run_dir, self.manager)
        self._kept, self.keep_latest = kept, keep_latest

    def opened(self) -> CheckpointManager:
        context = StorageContext(
            storage_path=f"{self.run_dir.files.path('runs')}", experiment_dir_name="run_r"
        )
        return CheckpointManager(ray.train.CheckpointConfig(), context)

    def save(self, steps: Iterable[int]) -> None:
        """Checkpoints, each reported once the old ones are deleted."""

        async def reported() -> None:  # Ray wakes up who waits for a report, in its loop
            for step in steps:
                self._write(step)
                self._report(step)

        asyncio.run(reported())

    def _write(self, step: int) -> None:
        self.run_dir.files.write(f"{self.path(step)}/manifest.json", b"{}")
        if step > self.keep_latest and step - self.keep_latest not in self._kept:
            self.run_dir.files.delete_dir(self.path(step - self.keep_latest))

    def _report(self, step: int) -> None:
        checkpoint = ray.train.Checkpoint(self.run_dir.files.path(self.path(step)))
        self.manager.register_checkpoint(
            _TrainingReport(checkpoint=checkpoint, metrics={"loss": 1.0}, validation=False)
        )
        self.short.trim()

    def path(self, step: int) -> str:
        return self.run_dir.checkpoints_path(str(CheckpointName(step, 1, 1)))

    @staticmethod
    def steps(manager: CheckpointManager) -> list[int]:
        names = [
            CheckpointName.parse(Path(result.checkpoint.path).name)
            for result in manager.best_checkpoint_results
        ]
        return [name.step for name in names if name is not None]


def test_ray_s_list_stays_as_short_as_what_retention_keeps(tmp_path: Path) -> None:
    """Ray writes all of it with every report: of ten thousand checkpoints that is half a second
    each time."""
    reported = Reported(tmp_path, kept={7, 20}, keep_latest=3)
    reported.save(range(1, 501))
    listed = reported.steps(reported.manager)
    assert len(listed) <= 16
    assert {7, 20, 498, 499, 500} <= set(listed), "what is there is listed"
    repair_snapshot_file(reported.run_dir)  # as before every start of Ray's
    again = reported.opened()
    assert again.latest_checkpoint_result.checkpoint.path.endswith(f"/{CheckpointName(500, 1, 1)}")
    assert reported.steps(again) == [7, 20, 498, 499, 500]


def test_the_newest_report_stays_listed(tmp_path: Path) -> None:
    """Ray could not load a list without it. It may be below an older one: after a fall back past a
    corrupt checkpoint."""
    reported = Reported(tmp_path, kept={600}, keep_latest=3)
    reported.run_dir.files.write(f"{reported.path(600)}/manifest.json", b"{}")
    reported.save(range(1, 16))
    reported.keep_latest = 0
    reported.save([16])
    assert reported.steps(reported.manager) == [13, 14, 15, 16], "of these only the last is gone"
