"""Ray Train's list of checkpoints is put right, or removed, where Ray would refuse to start on it, and only there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray

from storage.filesystem import open_storage
from storage.run_dir import RunDir
from train_fn.ray_train.snapshot_file import repair_snapshot_file

NAME = "checkpoints/step-000000010.s001"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = open_storage(str(tmp_path)).run_dir("run_r")
    run_dir.files.write(f"runs/run_r/{NAME}/manifest.json", b"{}")
    return run_dir


def state(name: str = NAME, version: str = ray.__version__) -> bytes:
    return json.dumps({"ray_version": version, "checkpoint_results": [{"checkpoint_dir_name": name, "metrics": {}}]}).encode()


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (state(), True),
        (state("checkpoints/step-000000099.s001"), False),
        (state(version="2.59.0"), False),
        (state()[:-9], False),
        (b"", False),
        (b"[]", False),
        (None, False),
    ],
)
def test_only_a_list_that_ray_can_load_is_kept(run_dir: RunDir, content: bytes | None, kept: bool) -> None:
    path = "runs/run_r/checkpoint_manager_snapshot.json"
    if content is not None:
        run_dir.files.write(path, content)
    repair_snapshot_file(run_dir)
    assert run_dir.files.exists(path) is kept


def test_a_list_that_is_gone_is_taken_from_its_copy(run_dir: RunDir) -> None:
    """Without it Ray would call a user's function from its beginning."""
    listed = json.loads(state())
    whole = {**listed, "checkpoint_report_indices": [0], "latest_checkpoint_result": listed["checkpoint_results"][0]}
    run_dir.files.write("runs/run_r/checkpoint_list_copy.json", json.dumps(whole).encode())
    repair_snapshot_file(run_dir)
    assert json.loads(run_dir.files.read("runs/run_r/checkpoint_manager_snapshot.json")) == whole
