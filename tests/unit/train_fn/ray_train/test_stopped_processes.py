"""Stopped processes of a node: found, woken and ended; others are left alone. So are those found
that are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from train_fn.ray_train.group.node_checks import gone, signalled, stopped


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    made = [
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) for _ in range(2)
    ]
    made[0].send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while psutil.Process(made[0].pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield made
    for process in made:
        process.kill()
        process.wait()


def test_one_that_is_stopped_is_ended(processes: list[subprocess.Popen[bytes]]) -> None:
    pids = [process.pid for process in processes]
    assert signalled(pids, signal.SIGKILL) == [pids[0]]
    assert processes[0].wait(30) == -signal.SIGKILL and processes[1].poll() is None
    assert signalled(pids, signal.SIGKILL) == [], "it is gone"


def test_one_that_is_stopped_goes_on(processes: list[subprocess.Popen[bytes]]) -> None:
    pids = [process.pid for process in processes]
    assert stopped(pids) == signalled(pids, signal.SIGCONT) == [pids[0]]
    deadline = time.monotonic() + 30
    while stopped(pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_that_is_gone_is_found_before_and_after_it_is_reaped(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    pids = [process.pid for process in processes]
    assert gone(pids) == [], "a stopped one is there"
    processes[1].kill()
    os.waitid(os.P_PID, pids[1], os.WEXITED | os.WNOWAIT)
    assert gone(pids) == [pids[1]]
    processes[1].wait()
    assert gone(pids) == [pids[1]]
