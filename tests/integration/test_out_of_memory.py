"""A task that needs more memory than there is for its micro-batches goes on with smaller ones by
itself, under a real driver."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from tests.integration.driven_run import DrivenRun
from tests.integration.own_code_runs import begin, cluster, started
from tests.integration.ranks import Job, make_run_dir, train_to_end
from tests.integration.ray_cluster import RayCluster
from tests.integration.test_exactness import assert_same
from tests.support.code_archives import tar_gz
from train_fn.loop import build

__all__ = ["cluster", "started"]

pytestmark = pytest.mark.timeout(600)

TASK = """
import torch
from torch import nn


class Hungry:
    def __init__(self, most, begins_at):
        self.most, self.begins_at = most, begins_at

    def build_model(self):
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def build_datasets(self):
        rows = torch.linspace(-1, 1, 300).reshape(100, 3)
        return dict.fromkeys(("train", "val"), [(row, row.sum()) for row in rows])

    def loss(self, model, batch, step):
        rows, wanted = batch
        if len(rows) > self.most and step >= self.begins_at:
            torch.empty(10**14)
        return (model(rows).squeeze(1) - wanted).square().sum(), len(rows)
"""
STEPS = 500
TRAIN: dict[str, Any] = {
    "max_steps": STEPS,
    "eval_every_epochs": 20,
    "global_batch_size": 20,
    "micro_batch_size": 7,
    "loader": {"num_workers": 0},
    "on_out_of_memory": "smaller",
}
"""Micro-batches of 7, 7 and 6 samples become six of 3 and one of 2."""
SECTIONS: dict[str, Any] = {"train": TRAIN, "checkpoint": {"every_steps": 100}}


def never_hungry() -> None:
    scope: dict[str, Any] = {}
    exec(TASK, scope)
    build.build_task = lambda spec: scope["Hungry"](20, 0)


def in_peace(tmp_path: Path, begins_at: int) -> RunDir:
    """Train with the spec's micro-batches up to a step, and with smaller ones from there on."""
    run_dir, submission = make_run_dir(tmp_path), 0
    for submission, size in enumerate((7, 3) if begins_at else (3,), start=1):
        train = {**TRAIN, "micro_batch_size": size}
        task = {"name": "image_classification", "model": {"name": "mini_resnet"}}
        raw = {"name": "own", "task": {**task, "data": {"name": "digits"}}}
        job = Job(
            run_dir,
            RunSpec.model_validate({**raw, **SECTIONS, "train": train}),
            world_size=2,
            submission=submission,
            stopped=("pause", begins_at - 1) if size == 7 else None,
            setup=f"{__name__}:never_hungry",
        )
        train_to_end(job, tmp_path)
    return run_dir


def trained(run_dir: RunDir) -> Any:
    """Return the weights and the optimizer's values after the last step."""
    store = CheckpointStore(run_dir)
    newest = store.list()[-1]
    assert newest.step == STEPS
    model, state = (
        torch.load(io.BytesIO(store.read_file(newest.name, name)))
        for name in ("model.pt", "train_state.pt")
    )
    return model, state["optimizer"], state["chain"]


@pytest.mark.parametrize("begins_at", [0, 4])
def test_it_goes_on_with_smaller_micro_batches_for_good(
    begins_at: int, started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    code = {"task": "task:Hungry", "args": {"most": 3, "begins_at": begins_at}}
    archive = tar_gz({"task.py": TASK})
    run = begin(started, cluster, tmp_path, archive, code, min_workers=2, **SECTIONS)
    run.wait_for_step(50)
    os.kill(run.worker(1)["pid"], signal.SIGKILL)
    run.wait_for_step(150, attempt=2)
    first = run.events
    run.kill_driver()
    run.events = []
    run.start(submission=2)
    assert run.wait_for_end() == 0, run.describe()
    run.events = [*first, *run.events]
    failures = [event.data for event in run.of(EventKind.FAILURE)]
    assert [(each["verdict"], each["budget"], each["step"]) for each in failures[:1]] == [
        ("out_of_memory", None, begins_at)
    ]
    assert failures[0]["action"] == "restart at once with micro-batches of 3 in place of 7"
    assert [each["verdict"] for each in failures[1:]] == ["worker_lost", "control_plane"]
    assert {event.data["steps_lost"] for event in run.of(EventKind.RECOVERED)} == {0}
    sizes = [event.data["micro_batch_size"] for event in run.of(EventKind.TRAINING_STARTED)]
    assert sizes == ([7] if begins_at else []) + [3, 3, 3]
    assert not run.of(EventKind.NUMERICS_CHANGED), "other samples are no other kernels"
    assert_same(trained(run.run_dir), trained(in_peace(tmp_path, begins_at)))
