"""Workers that are forked: they are what an exec would have made, they end when their node loses
them, and they share no ids."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from service.embedded import worker_start
from service.embedded.worker_start import CONTEXT_FLAG, FORK_SERVER_VARIABLE, plan
from tests.support.fork_server_process import ForkServerProcess
from tests.support.service_process import wait_for

WORKER = """
import json, logging, os, sys, time
from pathlib import Path
import ray
from ray._raylet import JobID, PlacementGroupID
out = Path(sys.argv[1])
out.with_suffix(".part").write_text(json.dumps({
    "pid": os.getpid(), "argv": sys.argv[2:], "name": __name__,
    "cwd": os.getcwd(), "a": os.environ.get("A"),
    "group": os.getpgrp(), "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    "log_handlers": len(logging.root.handlers), "policy": os.sched_getscheduler(0),
    "imported": "torch" in sys.modules,
    "ids": [
        PlacementGroupID.of(JobID.from_int(1)).hex(),
        ray.ActorClassID.from_random().hex(),
        ray.WorkerID.from_random().hex(),
    ],
}))
out.with_suffix(".part").rename(out)
print("hello")
if "stay" in sys.argv:
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServerProcess]:
    made = ForkServerProcess(tmp_path_factory.mktemp("fork"))
    yield made
    made.kill()


@pytest.fixture
def address(server: ForkServerProcess) -> str:
    return server.address


class Started:
    """A stand-in with its worker, which says in a file what it is."""

    def __init__(self, address: str, directory: Path, *arguments: str) -> None:
        directory.mkdir(exist_ok=True)
        script = directory / "worker.py"
        script.write_text(WORKER)
        self.out = directory / "said.json"
        context = CONTEXT_FLAG + json.dumps({"env_vars": {"A": "1"}})
        command = [
            sys.executable,
            worker_start.__file__,
            context,
            "--language=PYTHON",
            str(script),
            str(self.out),
            *arguments,
        ]
        env = {**os.environ, FORK_SERVER_VARIABLE: address}
        give_way = functools.partial(os.sched_setscheduler, 0, os.SCHED_BATCH, os.sched_param(0))
        self.process = subprocess.Popen(
            command, env=env, cwd=directory, stdout=subprocess.PIPE, text=True, preexec_fn=give_way
        )

    def said(self) -> dict[str, object]:
        wait_for(self.out.exists, 60, "the worker's word")
        return dict(json.loads(self.out.read_text()))


def test_a_forked_worker_is_what_an_exec_would_have_made(address: str, tmp_path: Path) -> None:
    started = Started(address, tmp_path, "--x=1")
    out, _ = started.process.communicate(timeout=60)
    said = started.said()
    assert started.process.returncode == 0
    assert out == "hello\n", "it writes where the raylet had it write"
    assert said["pid"] != started.process.pid, "it was forked elsewhere"
    assert said["argv"] == ["--x=1"]
    assert said["name"] == "__main__"
    assert said["cwd"] == str(tmp_path)
    assert said["a"] == "1", "the runtime environment's variables are set"
    assert said["group"] == os.getpgrp()
    assert said["niceness"] == os.getpriority(os.PRIO_PROCESS, 0)
    assert said["log_handlers"] == 0, (
        "the server's would write secrets to the worker's stderr that its own output masks"
    )
    assert said["policy"] == os.SCHED_BATCH, "it gives way as its raylet does"


def test_two_workers_make_different_ids(address: str, tmp_path: Path) -> None:
    first, second = Started(address, tmp_path / "1"), Started(address, tmp_path / "2")
    for one, other in zip(first.said()["ids"], second.said()["ids"], strict=True):  # type: ignore[call-overload]
        assert one != other
    for started in (first, second):
        started.process.communicate(timeout=60)


def test_a_stand_in_that_is_killed_takes_its_worker_along(address: str, tmp_path: Path) -> None:
    started = Started(address, tmp_path, "stay")
    pid = int(str(started.said()["pid"]))
    worker = psutil.Process(pid)
    started.process.kill()
    started.process.communicate()
    psutil.wait_procs([worker], timeout=60)
    assert not psutil.pid_exists(pid)


def test_a_worker_whose_raylet_dies_ends(address: str, tmp_path: Path) -> None:
    script = tmp_path / "raylet.py"
    script.write_text("import subprocess, sys\nsubprocess.Popen(sys.argv[1:]).wait()\n")
    worker, out = tmp_path / "worker.py", tmp_path / "said.json"
    worker.write_text(WORKER)
    env = {**os.environ, FORK_SERVER_VARIABLE: address}
    raylet = subprocess.Popen(
        [sys.executable, script, sys.executable, worker_start.__file__, worker, out, "stay"],
        env=env,
    )
    wait_for(out.exists, 60, "the worker's word")
    pid = json.loads(out.read_text())["pid"]
    raylet.kill()
    raylet.wait()
    wait_for(lambda: not psutil.pid_exists(pid), 60, "the worker's end")


def test_what_a_fork_cannot_give_is_left_to_ray() -> None:
    assert plan([CONTEXT_FLAG + '{"py_executable": "/other/python"}', "w.py"], {}) is None
    assert plan([CONTEXT_FLAG + '{"command_prefix": ["podman", "run"]}', "w.py"], {}) is None
    assert plan(["--language=JAVA", "w.py"], {}) is None
    request = plan(
        [
            CONTEXT_FLAG + json.dumps({"py_executable": sys.executable, "command_prefix": []}),
            "w.py",
            "--a",
        ],
        {"B": "2"},
    )
    assert request is not None
    assert request["argv"] == ["w.py", "--a"]
    assert request["environ"] == {"B": "2"}
