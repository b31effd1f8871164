"""A copy that is taken while a run trains, put back on another home after everything of the first
one is gone: the run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.digits_run import STEPS_PER_EPOCH
from tests.support.service_process import ServiceProcess, wait_for

EPOCHS = 150
SPEC = {
    "name": "digits",
    "task": {
        "name": "image_classification",
        "model": {"name": "mini_resnet"},
        "data": {"name": "digits"},
    },
    "train": {"epochs": EPOCHS, "global_batch_size": 128, "micro_batch_size": 64},
    "scaling": {"min_workers": 1, "max_workers": 1},
    "checkpoint": {"every_steps": 30},
}


def copying(service: ServiceProcess, what: str, directory: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "everstep.cli.main", what, str(directory), *flags]
    environment = {**os.environ, "EVERSTEP_HOME": str(service.home)}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.chaos
def test_a_run_goes_on_from_a_copy_after_a_total_loss(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with ServiceProcess(nodes=1) as lost:
        run_id = lost.client().runs.create(SPEC).id
        wait_for(lambda: lost.client().runs.get(run_id).step >= 35, 120, "step 35")
        assert "1 runs" in copying(lost, "backup", copy)
        token = lost.token
    assert not lost.home.exists()
    back = ServiceProcess(nodes=1)
    copying(back, "restore", copy)
    with back:
        run = back.client().runs.get(run_id)
        run.wait(timeout_s=180)
        assert (run.step, run.submission) == (EPOCHS * STEPS_PER_EPOCH, 2), (
            "a new submission, from the newest checkpoint of the copy"
        )
        counted = [
            (epoch.used_once, epoch.duplicates, epoch.missing) for epoch in run.samples().epochs
        ]
        assert counted == [(1437, 0, 0)] * EPOCHS
        assert back.token != token, "the home's own token is not in the copy"
