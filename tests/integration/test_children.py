"""A rank whose code has started processes dies like any other, on a real cluster."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from everstep.wire.events import EventKind
from tests.integration.driven_run import DrivenRun
from tests.integration.own_code_runs import begin, cluster, started
from tests.integration.ray_cluster import RayCluster
from tests.support.code_archives import TASK, tar_gz

__all__ = ["cluster", "started"]

pytestmark = pytest.mark.timeout(600)

HELPERS = """
import multiprocessing, os, subprocess, sys, time

def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(1)
        os._exit(0)
    os.wait()

class Helped(Line):
    def build_datasets(self):
        pool = [multiprocessing.Process(target=time.sleep, args=(600,)) for _ in range(2)]
        for each in pool:
            each.start()
        daemon()
        self.program = subprocess.Popen(["sleep", "600"], close_fds=False, start_new_session=True)
        return super().build_datasets()

    def loss(self, model, batch):
        time.sleep(0.02)
        return super().loss(model, batch)
"""


def test_a_killed_rank_is_noticed_at_once_whatever_its_code_has_started(
    started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    archive = tar_gz({"task.py": f"{TASK}\n{HELPERS}"})
    train = {"epochs": 15, "global_batch_size": 4}
    run = begin(
        started, cluster, tmp_path, archive, {"task": "task:Helped"}, min_workers=2, train=train
    )
    run.wait_for_step(20)
    victim = run.worker(1)
    helpers = psutil.Process(victim["pid"]).children(recursive=True)
    os.kill(victim["pid"], signal.SIGKILL)
    assert run.wait_for_end() == 0, run.describe()
    assert len(helpers) >= 3
    assert [event.data["verdict"] for event in run.of(EventKind.FAILURE)] == ["worker_lost"]
    recovered = run.last(EventKind.RECOVERED).data
    assert (recovered["rung"], recovered["steps_lost"]) == ("in_process", 0)
    assert recovered["detect_s"] < 20, "not only once nothing has moved for a minute"
    _, alive = psutil.wait_procs(helpers, timeout=30)
    assert alive == []
    assert run.last(EventKind.FINISHED).data["outcome"] == "succeeded"
