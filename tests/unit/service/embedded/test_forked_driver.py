"""Drivers that are forked: a job's process is its driver in all that the job sees of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from service.embedded import worker_start
from service.embedded.worker_start import FORK_SERVER_VARIABLE
from tests.support.fork_server_process import ForkServerProcess
from tests.support.service_process import has_ended, wait_for

JOB = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

def stop(number, frame):
    print("stopped by", number)
    sys.exit(143)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
child = subprocess.Popen(["sleep", "600"]) if "child" in sys.argv else None
out = Path(sys.argv[1])
out.with_suffix(".part").write_text(json.dumps({
    "pid": os.getpid(), "session": os.getsid(0), "argv": sys.argv[1:], "name": __name__,
    "cwd": os.getcwd(), "a": os.environ.get("A"), "forked": "ray" in sys.modules,
    "niceness": os.getpriority(os.PRIO_PROCESS, 0), "child": child and child.pid,
}))
out.with_suffix(".part").rename(out)
print("hello")
if "stay" in sys.argv:
    time.sleep(600)
sys.exit(3)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServerProcess]:
    (tmp_path / "server").mkdir()
    environ = {"EVERSTEP_CLUSTER_DIR": "/tmp/es-test", "PYTHONPATH": str(tmp_path)}
    made = ForkServerProcess(tmp_path / "server", **environ)
    yield made
    made.kill()


class Job:
    """A job's command, whose driver says in a file what it is."""

    def __init__(self, server: ForkServerProcess | None, directory: Path, *arguments: str) -> None:
        (directory / "its_driver.py").write_text(JOB)
        self.out = directory / "said.json"
        variables = {"PYTHONPATH": str(directory)}
        variables |= {} if server is None else {FORK_SERVER_VARIABLE: server.address}
        self.process = subprocess.Popen(
            [
                sys.executable,
                *worker_start.DRIVER[1:-1],
                f"{worker_start.MODULE_FLAG}its_driver",
                str(self.out),
                *arguments,
            ],
            env={**os.environ, **variables, "A": "1"},
            cwd=directory,
            stdout=subprocess.PIPE,
            text=True,
        )

    def said(self) -> dict[str, object]:
        wait_for(self.out.exists, 60, "the driver's word")
        return dict(json.loads(self.out.read_text()))

    def driver(self) -> psutil.Process:
        return psutil.Process(int(str(self.said()["pid"])))


def test_a_forked_driver_is_what_an_exec_would_have_made(
    server: ForkServerProcess, tmp_path: Path
) -> None:
    job = Job(server, tmp_path, "--x=1")
    out, _ = job.process.communicate(timeout=60)
    said = job.said()
    assert job.process.returncode == 3
    assert out == "hello\n", "it writes to the job's log"
    assert said["forked"] and said["pid"] != job.process.pid
    assert said["session"] == said["pid"], "what it starts is ended with it"
    assert said["argv"] == [str(job.out), "--x=1"]
    assert (said["name"], said["cwd"], said["a"]) == ("__main__", str(tmp_path), "1")
    assert said["niceness"] == os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_of_the_job_is_one_of_its_driver(
    number: signal.Signals, server: ForkServerProcess, tmp_path: Path
) -> None:
    job = Job(server, tmp_path, "stay")
    job.said()
    job.process.send_signal(number)
    out, _ = job.process.communicate(timeout=60)
    assert out == f"hello\nstopped by {int(number)}\n"
    assert job.process.returncode == 143


def test_a_driver_that_is_killed_ends_its_job_by_the_same_signal(
    server: ForkServerProcess, tmp_path: Path
) -> None:
    job = Job(server, tmp_path, "stay")
    job.driver().kill()
    job.process.communicate(timeout=60)
    assert job.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("server_lives", [True, False])
def test_a_job_that_is_killed_takes_its_driver_and_what_that_started_along(
    server_lives: bool, server: ForkServerProcess, tmp_path: Path
) -> None:
    job = Job(server, tmp_path, "stay", "child")
    driver, child = job.driver(), psutil.Process(int(str(job.said()["child"])))
    if not server_lives:
        server.kill()
    assert not has_ended(driver) and not has_ended(child)
    job.process.kill()
    job.process.communicate()
    wait_for(lambda: has_ended(driver) and has_ended(child), 60, "the end of driver and child")


def test_a_driver_goes_on_without_the_server_and_its_job_then_fails(
    server: ForkServerProcess, tmp_path: Path
) -> None:
    job = Job(server, tmp_path, "stay")
    driver = job.driver()
    server.kill()
    assert not has_ended(driver)
    job.process.terminate()
    out, _ = job.process.communicate(timeout=60)
    assert job.process.returncode == 1
    assert "stopped by 15" in out and "its exit code is unknown" in out
