"""Ray Train's own list of reported checkpoints, repaired before it is read: Ray refuses to start on one that is not right."""

from __future__ import annotations

import json
import logging
from typing import Any

import ray

from storage.errors import StorageNotFound
from storage.run_dir import RunDir
from train_fn.ray_train.seam import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME

logger = logging.getLogger(__name__)


def repair_snapshot_file(run_dir: RunDir) -> None:
    """Remove the file where Ray could not load it: torn JSON, another Ray's, or naming a checkpoint that is gone.

    Ray overwrites it in place, and our retention deletes checkpoints that it names. Nothing is lost by removing it: ranks
    restore from manifests, never from Ray's list.
    """
    path = f"{_root(run_dir)}/{CHECKPOINT_MANAGER_SNAPSHOT_FILENAME}"
    try:
        data = run_dir.files.read(path)
    except StorageNotFound:
        return
    problem = _problem(run_dir, data)
    if problem:
        logger.info("Ray Train's checkpoint list is removed and begun anew: %s", problem)
        run_dir.files.delete_file(path)


def _problem(run_dir: RunDir, data: bytes) -> str | None:
    try:
        state: dict[str, Any] = json.loads(data)
        if state["ray_version"] != ray.__version__:
            return f"it was written by ray {state['ray_version']}"
        names = [result["checkpoint_dir_name"] for result in state["checkpoint_results"]]
    except (ValueError, KeyError, TypeError) as exc:
        return f"it is torn ({exc})"
    for name in names:
        if not run_dir.files.exists(f"{_root(run_dir)}/{name}/manifest.json"):
            return f"it names {name}, which is gone"
    return None


def _root(run_dir: RunDir) -> str:
    """The run's directory, which is Ray Train's experiment directory, as ``run_dir.files`` names it."""
    return run_dir.checkpoints_path().rsplit("/", 1)[0]
