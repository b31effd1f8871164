"""tick() on a real database and real storage: a queued run becomes one job, whatever happens."""

from __future__ import annotations

import asyncio
import gc
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.wire import ReasonCode, RunStatus
from service.cluster.ray_jobs import RAY_PYTHON
from service.db.engine import DatabaseUnavailable
from service.reconciler import execute
from service.reconciler.decide import MOST_NEVER_BEGUN, backoff_s
from service.reconciler.ray_poller import DRIVER
from storage.cluster import Known, read_identity
from storage.logs.rank_logs import read_rank_logs
from storage.run_dir import RunDir
from tests.support.fake_ray import FakeRay
from tests.support.reconciler_world import STARTED, World

pytest_plugins = ["tests.support.reconciler_fixtures"]
pytestmark = pytest.mark.usefixtures("whole_ticks")


async def test_a_queued_run_becomes_one_job(here: World, ray: FakeRay) -> None:
    run = here.create()
    for _ in range(3):
        await here.reconciler.tick()
    job_id = f"{run.id}-s001"
    assert ray.submissions == [job_id]
    job = ray.jobs[job_id]
    known = Known(storage=read_identity(here.storage)).to_text()
    command = f"{DRIVER} --storage {here.storage.uri} --run-id {run.id} --submission 1"
    assert job["entrypoint"] == f"EVERSTEP_KNOWN={shlex.quote(known)} {command}"
    page = f"https://everstep.example/runs/{run.id}"
    assert job["metadata"] == {
        "run_id": run.id,
        "run_name": "a",
        "project": "default",
        "submission": "1",
        "everstep": page,
    }
    assert not {"runtime_env", "entrypoint_num_cpus", "entrypoint_resources"} & job.keys()
    assert RunDir(here.storage, run.id).read_spec().name == "a"
    row = here.get(run.id)
    assert (row.status, row.submission, row.ray_job_id) == (RunStatus.STARTING, 1, job_id)


@pytest.mark.parametrize("python", ["/opt/everstep/bin/python", "/opt/my venv/python", None])
def test_a_job_runs_with_the_python_of_ray_s_workers(python: str | None) -> None:
    words = subprocess.list2cmdline([str(python), "setup_worker.py", "--node-ip-address=1"])
    option = f"--python_worker_command={words}"
    job = f"""import subprocess; subprocess.run(['/bin/sh', '-c', {f'echo "{RAY_PYTHON}"'!r}])"""
    supervisor = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {job!r}])"
    found = subprocess.run(
        [sys.executable, "-c", supervisor, *([option] if python else [])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (found.stdout, found.stderr) == (f"{python or 'python'}\n", "")


MISSING = "/usr/bin/python: No module named 'train_fn'"


def end_driver(ray: FakeRay, job_id: str, code: int, words: str) -> None:
    ray.jobs[job_id] |= {
        "driver_exit_code": code,
        "message": f"Job entrypoint command failed with exit code {code}\n{words}",
    }
    ray.end(job_id)


async def test_drivers_that_never_begin_end_a_run_and_are_shown(here: World, ray: FakeRay) -> None:
    run = here.create()
    await here.reconciler.tick()
    for submission in range(1, MOST_NEVER_BEGUN + 1):
        row = here.get(run.id)
        assert (row.status.terminal, row.submission) == (False, submission)
        end_driver(ray, f"{run.id}-s{submission:03}", 1, f"{MISSING}\0")  # no column holds NUL
        here.now += backoff_s(submission)
        await here.reconciler.tick()
        row = here.get(run.id)
        assert row.reason_code == ReasonCode.DRIVER_NEVER_BEGAN
        assert f"{MISSING}\\x00" in row.reason_message and "doctor" in row.reason_message
        await here.reconciler.tick()
    assert here.get(run.id).status == RunStatus.FAILED
    kept, _ = read_rank_logs(RunDir(here.storage, run.id))
    assert [(line.submission, line.rank, line.message) for line in kept] == [
        (submission, None, f"{MISSING}\\x00") for submission in range(1, MOST_NEVER_BEGUN + 1)
    ]


@pytest.mark.parametrize(("code", "begin"), [(1, 9), (143, 0), (1, 1)])
async def test_drivers_that_were_ended_or_of_which_one_began_fail_no_run(
    code: int, begin: int, here: World, ray: FakeRay
) -> None:
    run = here.create()
    await here.reconciler.tick()
    for submission in range(1, MOST_NEVER_BEGUN + 2):
        if submission <= begin:
            here.write(run.id, submission, *STARTED)
        end_driver(ray, f"{run.id}-s{submission:03}", code, "words")
        here.now += backoff_s(submission)
        for _ in range(2):
            await here.reconciler.tick()
        row = here.get(run.id)
        assert (row.status.terminal, row.submission) == (False, submission + 1)
        is_told = code == 1 and submission > begin
        assert (row.reason_code == ReasonCode.DRIVER_NEVER_BEGAN) == is_told


@pytest.mark.parametrize("point", ["before_claim", "after_claim", "after_submit", "after_record"])
async def test_a_kill_at_any_line_of_a_start_leaves_one_job(
    point: str, tmp_path: Path, ray: FakeRay, here: World
) -> None:
    run = here.create()
    command = [sys.executable, "-m", "tests.support.reconciler_world", str(tmp_path), ray.url]
    killed = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "EVERSTEP_CRASH_POINT": point}
    )
    assert await killed.wait() == -signal.SIGKILL
    for _ in range(3):
        await here.reconciler.tick()
    assert list(ray.jobs) == [f"{run.id}-s001"]
    row = here.get(run.id)
    assert (row.status, row.submission, row.ray_job_id) == (RunStatus.STARTING, 1, f"{run.id}-s001")


async def test_what_can_never_fit_says_so_and_starts_when_it_can(here: World, ray: FakeRay) -> None:
    run = here.create(scaling={"min_workers": 3, "max_workers": 3})
    await here.reconciler.tick()
    row = here.get(run.id)
    assert (row.status, row.reason_code) == (RunStatus.QUEUED, ReasonCode.INFEASIBLE)
    assert "1 CPU more" in (row.reason_message or "")
    ray.nodes.append(ray.node("n2", {"CPU": 1.0}))
    await here.reconciler.tick()
    assert list(ray.jobs) == [f"{run.id}-s001"]


async def test_storage_that_cannot_be_written_keeps_the_run_queued(
    here: World, ray: FakeRay, tmp_path: Path
) -> None:
    (tmp_path / "storage").write_text("a file where the directory should be")
    run = here.create()
    await here.reconciler.tick()
    row = here.get(run.id)
    assert (row.status, row.submission, row.reason_code) == (
        RunStatus.QUEUED,
        0,
        ReasonCode.STORAGE_UNAVAILABLE,
    )
    assert ray.submissions == []


async def test_of_many_runs_that_fail_at_once_each_failure_is_taken(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody takes is told by the event loop, with its traceback: of hundreds that held a
    service up for minutes."""
    for _ in range(3):
        here.create()
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: unhandled.append(context)
    )

    async def fail(*_: object) -> None:
        raise DatabaseUnavailable("away")

    monkeypatch.setattr(execute.Executor, "_execute_for", fail)
    with pytest.raises(DatabaseUnavailable):
        await here.reconciler.tick()
    gc.collect()
    await asyncio.sleep(0)
    assert unhandled == []
