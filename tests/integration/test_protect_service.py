"""A loop of one's own under the driver, protected: a rank is killed, and the run goes on from its
peer's state, as a task does. Its checkpoints are Everstep's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from everstep.code import pack
from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.code import CodeStore
from storage.filesystem import open_storage
from tests.integration.driven_run import DrivenRun
from tests.integration.own_code_runs import begin, cluster, started
from tests.integration.ray_cluster import REPOSITORY, RayCluster
from tests.support.code_archives import tar_gz
from tests.support.gallery import finished, finished_in
from tests.support.rank_processes import run_id_for
from train_fn.protect.training import EXACT, LOADER_RESTORED

__all__ = ["cluster", "started"]

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop"
GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
STEPS_PER_EPOCH = 29
"""Of 1,797 samples in global batches of 64."""
LIKE_A_RUN = """from train_fn.user_code.modules import declare_missing_ops

declare_missing_ops()
"""
"""What a run of the service does before a script: torchvision may be a build for another torch."""
SCRIPT_EPOCHS = 120
SCRIPT_STEPS = 10 * SCRIPT_EPOCHS
"""Of 400 samples in batches of 20 on each of 2 ranks."""


@contextmanager
def driven(
    cluster: RayCluster, tmp_path: Path, train_fn: str, epochs: int, min_workers: int
) -> Iterator[DrivenRun]:
    """A run of an example with a loop of its own, on two ranks."""
    digest = CodeStore(open_storage(str(tmp_path))).put(pack(EXAMPLE)).digest
    spec = RunSpec.model_validate(
        {
            "name": "own-loop",
            "code": {"archive": digest, "train_fn": train_fn, "config": {"epochs": epochs}},
            "scaling": {"min_workers": min_workers, "max_workers": 2},
            "checkpoint": {"every_steps": 100},
        }
    )
    run = DrivenRun(cluster, tmp_path, spec)
    yield run
    run.stop()


@pytest.fixture
def run(cluster: RayCluster, tmp_path: Path) -> Iterator[DrivenRun]:
    with driven(cluster, tmp_path, "train:train_fn", epochs=60, min_workers=1) as run:
        yield run


def assert_nothing_lost(run: DrivenRun, steps_per_epoch: int) -> None:
    """No step is lost, but an epoch's last one if a rank dies before all have begun the next."""
    lost = run.last(EventKind.RECOVERED).data["steps_lost"]
    step = run.of(EventKind.RESTORED)[1].data["step"] + lost
    assert lost == 0 or (lost < 2 * steps_per_epoch and step % steps_per_epoch == 0)


def test_a_protected_loop_loses_no_step_is_paused_and_goes_on(run: DrivenRun) -> None:
    run.start()
    run.wait_for_step(200)
    os.kill(run.worker(1)["pid"], signal.SIGKILL)
    run.wait_for(lambda: run.of(EventKind.RECOVERED), "the recovery")
    assert_nothing_lost(run, STEPS_PER_EPOCH)
    first, second = (event.data for event in run.of(EventKind.RESTORED))
    assert (first["source"], first["step"]) == ("fresh", 0)
    assert second["source"] == "snapshot" and second["step"] > 170 and not second["rejected"]
    assert run.last(EventKind.TRAINING_STARTED).data["guarantee"] == EXACT
    run.run_dir.request_stop(1, "pause")
    assert run.wait_for_end() == 0, run.describe()
    paused_at = max(step for step, _ in run.steps())
    assert run.last(EventKind.FINISHED).data["reason"]["code"] == "paused_by_user"
    assert CheckpointStore(run.run_dir).list()[-1].step == paused_at
    steps = {step for step, _ in run.steps()}
    assert steps == set(range(1, paused_at + 1))
    run.start(submission=2)
    assert run.wait_for_end() == 0, run.describe()
    third = run.last(EventKind.RESTORED).data
    assert (third["source"], third["step"]) == ("checkpoint", paused_at)
    assert steps | {step for step, _ in run.steps()} == set(range(1, 60 * STEPS_PER_EPOCH + 1))
    for epoch in run.of(EventKind.EPOCH_COMPLETED):
        facts = epoch.data
        assert (facts["used_once"], facts["duplicates"], facts["missing"]) == (1797, 0, 0)
    assert run.last(EventKind.FINISHED).data["outcome"] == "succeeded"
    newest = CheckpointStore(run.run_dir).list()[-1]
    assert newest.step == 60 * STEPS_PER_EPOCH
    CheckpointStore(run.run_dir).verify(newest.name)


@pytest.fixture
def sharded_run(cluster: RayCluster, tmp_path: Path) -> Iterator[DrivenRun]:
    with driven(cluster, tmp_path, "sharded:train_fn", epochs=12, min_workers=2) as run:
        yield run


def test_a_sharded_model_loses_no_reported_step(sharded_run: DrivenRun) -> None:
    run = sharded_run
    run.start()
    run.wait_for_step(60)
    os.kill(run.worker(1)["pid"], signal.SIGKILL)
    assert run.wait_for_end() == 0, run.describe()
    assert_nothing_lost(run, STEPS_PER_EPOCH)
    first, second = (event.data for event in run.of(EventKind.RESTORED))
    assert (first["source"], second["source"]) == ("fresh", "snapshot")
    assert second["step"] >= 60 and not second["rejected"]
    assert {step for step, _ in run.steps()} == set(range(1, 12 * STEPS_PER_EPOCH + 1))
    for epoch in run.of(EventKind.EPOCH_COMPLETED):
        facts = epoch.data
        assert (facts["used_once"], facts["duplicates"], facts["missing"]) == (1797, 0, 0)
    newest = CheckpointStore(run.run_dir).list()[-1]
    assert newest.step == 12 * STEPS_PER_EPOCH and len(newest.files) == 3
    CheckpointStore(run.run_dir).verify(newest.name)


CATCHES_ITS_END = """
import time, traceback
import torch
import everstep.train as es


def loop(config):
    inputs = torch.arange(640.0).sin().reshape(80, 8)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    if torch.distributed.get_world_size() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = es.protect(model=model, optimizer=optimizer)
    data = es.loader(inputs, global_batch_size=8)
    with state:
        for batch in data.batches(state, steps=1000):
            (model(batch).square().mean() * data.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
            state.step()


def train_fn(config):
    try:
        loop(config)
    except:
        traceback.print_exc()
    print("cleaning up")
"""


@pytest.mark.chaos
def test_code_that_catches_its_end_is_resized_and_paused_and_has_not_succeeded(
    started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    code = {"train_fn": "catches:train_fn", "config": {}}
    run = begin(started, cluster, tmp_path, tar_gz({"catches.py": CATCHES_ITS_END}), code)
    run.wait_for_step(20)
    run.run_dir.write_workers_limit(1)
    run.wait_for(lambda: len(run.of(EventKind.ATTEMPT_STARTED)) > 1, "the smaller group")
    attempts = [event.data["world_size"] for event in run.of(EventKind.ATTEMPT_STARTED)]
    assert attempts == [2, 1] and not run.of(EventKind.FAILURE)
    run.wait_for_step(run.last(EventKind.ATTEMPT_ENDED).data["last_step"] + 20, attempt=1)
    run.run_dir.request_stop(1, "pause")
    assert run.wait_for_end() == 0, run.describe()
    finished = run.last(EventKind.FINISHED).data
    assert (finished["outcome"], finished["reason"]["code"]) == ("stopped", "paused_by_user")
    paused_at = max(step for step, _ in run.steps())
    assert CheckpointStore(run.run_dir).list()[-1].step == paused_at < 1000


@pytest.mark.chaos
def test_a_protected_script_loses_no_step(
    started: list[DrivenRun], cluster: RayCluster, tmp_path: Path
) -> None:
    """Losses and weights are those of a twin that torchrun starts, and that nobody kills."""
    source, argv = (GALLERY / "torchrun_script.py").read_text(), ["--epochs", str(SCRIPT_EPOCHS)]
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(source)
    code = {"script": "train.py", "argv": argv}
    run = begin(started, cluster, tmp_path, pack(project), code, min_workers=2)
    run.wait_for_step(100)
    os.kill(run.worker(1)["pid"], signal.SIGKILL)
    assert run.wait_for_end() == 0, run.describe()
    assert_nothing_lost(run, SCRIPT_STEPS // SCRIPT_EPOCHS)
    first, second = (event.data for event in run.of(EventKind.RESTORED))
    assert (first["source"], second["source"]) == ("fresh", "snapshot")
    assert second["step"] > 100 - SCRIPT_STEPS // SCRIPT_EPOCHS
    assert run.last(EventKind.TRAINING_STARTED).data["guarantee"] == LOADER_RESTORED
    assert run.last(EventKind.FINISHED).data["outcome"] == "succeeded"
    twin_id = run_id_for(tmp_path, "twin")
    (tmp_path / f"{twin_id}.py").write_text(LIKE_A_RUN + source)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["--nproc-per-node", "2", f"{twin_id}.py", *argv]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, *script], cwd=tmp_path, env=environment, check=True, timeout=120)
    twin = finished(tmp_path, twin_id)
    broken = finished_in(run.run_dir)
    assert broken.losses == twin.losses and set(twin.losses) == set(range(1, SCRIPT_STEPS + 1))
    assert broken.step == twin.step == SCRIPT_STEPS
    assert broken.weights.keys() == twin.weights.keys()
    for name, value in twin.weights.items():
        assert torch.equal(broken.weights[name], value), name
