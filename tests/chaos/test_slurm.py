"""Under a real Slurm of two nodes, by the scripts in ``deploy``: what ends a node, a rank or a job
costs no step where a node lives, and the job that is requeued goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from everstep import Client
from everstep.client.runs import RunHandle
from everstep.errors import Unavailable
from storage.run_dir import RunDir
from tests.chaos.test_standalone import (
    assert_equal_to_one_left_alone,
    events,
    run_dir_of,
    spec_file,
    steps,
)
from tests.support.service_process import free_port, wait_for
from tests.support.slurm_cluster import SlurmCluster, is_possible

__all__ = ["spec_file"]

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_possible(), reason="needs root, slurmctld, slurmd and munge"),
]

DEPLOY = Path(__file__).parents[2] / "deploy"
NODES = ("n1", "n2")
DEADLINE_S = 240.0
T = TypeVar("T")


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with SlurmCluster(NODES) as cluster:
        yield cluster


class Job:
    """A job of one of the scripts in ``deploy``, on both nodes."""

    def __init__(
        self, slurm: SlurmCluster, directory: Path, env: dict[str, str], script: str, *words: str
    ) -> None:
        self.slurm = slurm
        self._out = directory / "job.out"
        submit = ["sbatch", "--parsable", "--nodes", str(len(NODES)), "--output", str(self._out)]
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PORT": str(free_port()), **env}
        words = (*submit, str(DEPLOY / script), *words)
        self.number = slurm.run(*words, cwd=directory, env=own).strip()
        assert self.number, slurm.logs()

    @property
    def state(self) -> str:
        return self.slurm.job(self.number).get("JobState", "?")

    @property
    def num_requeued(self) -> int:
        return int(self.slurm.job(self.number).get("Restarts", "0"))

    def ask_to_leave(self) -> None:
        """Send the signal that Slurm sends before a time limit and at a pre-emption."""
        self.slurm.run("scancel", "--batch", "--signal", "TERM", self.number)

    def wait_for(self, fact: Callable[[], T | None], what: str) -> T:
        """Wait for a fact. Fails with the job's output, at once if the job has ended."""

        def look() -> T | None:
            found = fact()
            if not found:
                assert self.state not in ("FAILED", "COMPLETED", "CANCELLED"), self.output()
            return found

        try:
            return wait_for(look, DEADLINE_S, what, every_s=0.3)
        except TimeoutError as exc:
            raise TimeoutError(f"{exc}:\n{self.output()}\n{self.slurm.logs()}") from None

    def output(self) -> str:
        return self._out.read_text() if self._out.exists() else ""


def reach(job: Job, run_dir: RunDir, step: int) -> None:
    """Wait until so many steps are done."""
    job.wait_for(lambda: max(steps(run_dir), default=0) >= step, f"step {step}")


def beginnings(run_dir: RunDir) -> list[tuple[str, int]]:
    """Return where each attempt took its state from, and its step."""
    return [
        (str(event.data["source"]), int(event.data["step"]))
        for event in events(run_dir)
        if event.kind == "restored"
    ]


def steps_done_again(run_dir: RunDir) -> list[int]:
    """Return for each attempt how many steps that were reported before it does again."""
    newest, again = 0, []
    for event in events(run_dir):
        if event.kind == "metrics":
            newest = max(newest, *(point["step"] for point in event.data["points"]))
        elif event.kind == "restored":
            again.append(max(0, newest - event.data["step"]))
    return again


def ranks_of(run_dir: RunDir) -> list[psutil.Process]:
    """Return the processes of a run's ranks, as this machine counts them."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if "train_fn.standalone" in words and run_dir.run_id in words and "-u" in words:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_torchrun_loses_no_step_to_the_end_of_a_rank_a_job_and_a_node(
    slurm: SlurmCluster, spec_file: Path, tmp_path: Path
) -> None:
    """A rank is killed, the job is asked to leave, and a node loses its power: then Slurm starts
    the job again. Each time training goes on at the very step."""
    spec_file.write_text(spec_file.read_text().replace("epochs: 2", "epochs: 1"))
    run_dir = run_dir_of(tmp_path, "slurm")
    words = (str(spec_file), "--storage", str(tmp_path / "storage"), "--run-id", run_dir.run_id)
    env = {"PYTHON": sys.executable, "NPROC": "1"}
    job = Job(slurm, tmp_path, env, "torchrun/everstep.sbatch", *words)
    reach(job, run_dir, 20)
    ranks_of(run_dir)[-1].kill()
    job.wait_for(lambda: len(beginnings(run_dir)) == 2, "torchrun's restart")

    reach(job, run_dir, max(steps(run_dir)) + 20)
    job.ask_to_leave()
    job.wait_for(lambda: len(beginnings(run_dir)) == 3, "the job's second start")
    assert job.num_requeued == 1

    reach(job, run_dir, max(steps(run_dir)) + 20)
    slurm.kill_node("n2")
    job.wait_for(lambda: job.num_requeued == 2, "Slurm's requeue")
    slurm.start_node("n2")
    wait_for(lambda: job.state in ("COMPLETED", "FAILED"), DEADLINE_S, "its end", every_s=0.5)
    assert job.state == "COMPLETED", job.output()

    done = set(steps(run_dir))
    assert done == set(range(1, max(done) + 1)), "every step is reported"
    assert steps_done_again(run_dir) == [0, 0, 0, 0]
    sources = [source for source, _ in beginnings(run_dir)]
    assert sources == ["fresh", "snapshot", "checkpoint", "snapshot"]
    assert_equal_to_one_left_alone(spec_file, tmp_path, run_dir)


@pytest.fixture
def service(slurm: SlurmCluster, tmp_path: Path) -> Iterator[tuple[Job, Client]]:
    """The service and its Ray cluster inside a job on both nodes, which is cancelled afterwards."""
    ports = {name: str(free_port()) for name in ("DASHBOARD_PORT", "API_PORT")}
    home = tmp_path / "home"
    env = {
        **ports,
        "EVERSTEP_HOME": str(home),
        "EVERSTEP_BIN": str(Path(sys.executable).parent),
        "RAY_TMPDIR": str(slurm.local / "ray"),
    }
    job = Job(slurm, tmp_path, env, "slurm/everstep.sbatch")
    address = f"http://{slurm.addresses['n1']}:{ports['API_PORT']}"
    job.wait_for(lambda: f"Everstep: {address}" in job.output(), "the service")
    client = Client(address, (home / "token").read_text(), max_tries=20)
    yield job, client
    client.close()
    slurm.run("scancel", job.number)
    wait_for(lambda: job.state == "CANCELLED", DEADLINE_S, "the job's end", every_s=0.5)


def run_until(job: Job, run: RunHandle, step: int, after: int) -> None:
    """Wait until a run is at a step again, in a later attempt than that many restarts."""

    def is_there() -> bool:
        try:
            run.refresh()
        except Unavailable:  # the service is on its way back
            return False
        assert not run.status.terminal, (run.status, run.reason)
        return run.step >= step and run.restarts >= after and run.status == "RUNNING"

    job.wait_for(is_there, f"step {step} after {after} restarts")


def test_the_service_inside_a_job_loses_no_step_to_a_node_or_a_requeue(
    slurm: SlurmCluster, service: tuple[Job, Client]
) -> None:
    """A node loses its power, the job is asked to leave and starts again, then the node of head
    and service loses its power, and the job is requeued: the run ends with every sample used
    once."""
    job, client = service
    run = client.runs.create(
        {
            "name": "slurm",
            "task": {
                "name": "image_classification",
                "model": {"name": "mini_resnet", "args": {"width": 8}},
                "data": {"name": "digits"},
            },
            "train": {"epochs": 80, "global_batch_size": 64, "micro_batch_size": 32},
            "scaling": {"min_workers": 1, "max_workers": 2, "use_gpu": False},
            "checkpoint": {"every_steps": 50, "keep_latest": 2},
        }
    )
    run_until(job, run, 20, after=0)
    assert run.world_size == 2
    slurm.kill_node("n2")
    run_until(job, run, run.step + 20, after=1)
    assert (run.world_size, run.steps_lost, job.num_requeued) == (1, 0, 0)

    slurm.start_node("n2", waits=False)
    before = run.step
    job.ask_to_leave()
    job.wait_for(lambda: job.num_requeued == 1, "the job's second start")
    run_until(job, run, before + 20, after=1)
    assert run.steps_lost == 0, "it was paused, and the pause saved it"

    before = run.step
    slurm.kill_node("n1")
    wait_for(lambda: slurm.state_of("n1") == "down", DEADLINE_S, "Slurm's notice", every_s=0.5)
    slurm.start_node("n1", waits=False)
    slurm.run("scontrol", "requeue", job.number)
    job.wait_for(lambda: job.num_requeued == 2, "the job's third start")
    run_until(job, run, before + 20, after=1)
    assert run.steps_lost <= 50, "from the newest checkpoint at least"
    run.wait(timeout_s=DEADLINE_S)
    for epoch in run.samples().epochs:
        assert (epoch.duplicates, epoch.missing) == (0, 0)
