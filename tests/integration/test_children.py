"""A rank whose code has started processes dies like any other, on a real cluster."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from everstep.wire.events import EventKind
from storage.logs.rank_logs import read_rank_logs
from tests.integration.driven_run import DrivenRun
from tests.integration.own_code_runs import begin, cluster, started
from tests.integration.ray_cluster import RayCluster
from tests.support.code_archives import TASK, tar_gz

__all__ = ["cluster", "started"]

pytestmark = pytest.mark.timeout(600)

HELPERS = """
import ctypes, logging, multiprocessing, os, subprocess, sys, time

log = logging.getLogger("mine")
log.propagate, log.handlers = False, [logging.StreamHandler(sys.stdout)]
log.setLevel(logging.INFO)

def past_python():
    if ctypes.CDLL(None).fork() == 0:
        while True:
            time.sleep(1)

def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(1)
        os._exit(0)
    os.wait()

class Helped(Line):
    def __init__(self, claim):
        super().__init__()
        self.claim = claim

    def build_datasets(self):
        pool = [multiprocessing.Process(target=time.sleep, args=(600,)) for _ in range(2)]
        for each in pool:
            each.start()
        daemon()
        if "RANK" in os.environ:  # not where the task is built for all
            try:
                with open(self.claim, "x") as file:
                    file.write(str(os.getpid()))
            except FileExistsError:
                pass
            else:
                past_python()
        self.program = subprocess.Popen(["sleep", "600"], close_fds=False, start_new_session=True)
        return super().build_datasets()

    def loss(self, model, batch, step):
        time.sleep(0.02)
        log.info("mine in step %d", step)
        return super().loss(model, batch)
"""


@pytest.mark.chaos
def test_a_killed_rank_is_noticed_at_once_whatever_its_code_has_started(
    started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    """The first one has a child that nothing told to let go of its connections. What was started
    where the task was to be built for all ranks has ended with that."""
    archive = tar_gz({"task.py": f"{TASK}\n{HELPERS}"})
    train = {"epochs": 25, "global_batch_size": 4}
    claim = tmp_path / "claim"
    code = {"task": "task:Helped", "args": {"claim": str(claim)}}
    run = begin(started, cluster, tmp_path, archive, code, min_workers=2, train=train)
    helpers, killed = [], []
    for attempt in (1, 2):
        run.wait_for_step(20 * attempt, attempt=attempt - 1)
        workers = [run.worker(rank) for rank in range(2)]
        if attempt == 1:
            workers = [each for each in workers if each["pid"] == int(claim.read_text())]
        victim = workers[0]
        killed.append(("worker_lost", victim["rank"]))
        helpers += psutil.Process(victim["pid"]).children(recursive=True)
        os.kill(victim["pid"], signal.SIGKILL)
    assert run.wait_for_end() == 0, run.describe()
    assert len(helpers) >= 7
    failures = [(e.data["verdict"], e.data["first_rank"]) for e in run.of(EventKind.FAILURE)]
    assert failures == killed
    for recovered in run.of(EventKind.RECOVERED):
        assert (recovered.data["rung"], recovered.data["steps_lost"]) == ("snapshot", 0)
        assert recovered.data["detect_s"] < 30, "not only once nothing has moved for a minute"
    _, alive = psutil.wait_procs(helpers, timeout=30)
    assert alive == []
    assert run.last(EventKind.FINISHED).data["outcome"] == "succeeded"
    lines, _ = read_rank_logs(run.run_dir, limit=100_000)
    told = {(each.attempt, each.rank) for each in lines if each.message.startswith("mine in step")}
    assert told == {(attempt, rank) for attempt in (1, 2, 3) for rank in (0, 1)}
