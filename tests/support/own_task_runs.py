"""Runs of one rank that train a task given as an object, with everything below one directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.spec.run_spec import RunSpec
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.one_rank import one_rank
from tests.support.raw_specs import TASK
from train_fn.context import WorkerContext
from train_fn.loop import build
from train_fn.loop.attempt import train
from train_fn.node import node_dir
from train_fn.recovery.evidence import StepFailed
from train_fn.snapshots import store as snapshot
from train_fn.standalone.start import begin_run


class TaskRuns:
    """Begin runs of tasks."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tmp_path, self._patch = tmp_path, monkeypatch
        shared = tmp_path / "shm"
        shared.mkdir()
        for module in (snapshot, node_dir):
            monkeypatch.setattr(module, "shared_memory_root", lambda: shared)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def begin(
        self,
        task: Any,
        *,
        name: str = "run_own",
        after: WorkerContext | None = None,
        **sections: Any,
    ) -> WorkerContext:
        """Return the context of one rank of a run that is about to train ``task``.

        Args:
            after: an earlier submission of the same run, from which it goes on.
            sections: of the spec. ``train`` begins with global batches of 8 in one micro-batch.
        """
        self._patch.setattr(build, "build_task", lambda spec: task)
        train = {
            "global_batch_size": 8,
            "micro_batch_size": 8,
            "loader": {"num_workers": 0},
            **sections.pop("train", {}),
        }
        raw = {"name": "own", "task": TASK, "checkpoint": {"every_steps": None}, "train": train}
        spec = RunSpec.model_validate(raw | sections)
        if after is not None:
            return one_rank(spec, after.run_dir, submission=after.submission + 1)
        run_dir = RunDir(open_storage(str(self._tmp_path / "storage")), name)
        start = begin_run(run_dir, spec, "test", fresh=True)
        return one_rank(spec, run_dir, submission=start.submission)


def refusal(ctx: WorkerContext) -> str:
    """Train, and return the message of the BadTask that ends it."""
    with pytest.raises(StepFailed) as raised:
        train(ctx)
    assert raised.value.error.type == "BadTask", raised.value.error.traceback
    return raised.value.error.message
