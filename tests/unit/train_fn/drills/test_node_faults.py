"""Faults on one node, on real processes: a stand-in for a raylet with a worker below it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from train_fn.drills import signal_ranks

NODE_ID = "c0ffee" * 9
PROGRAM = "sleep 60 & echo $!; wait"


@pytest.fixture
def node() -> Iterator[tuple[int, int]]:
    """Process ids of a process that looks like a raylet, and of its worker."""
    command = ["/somewhere/raylet", "-c", PROGRAM, f"--node_id={NODE_ID}"]
    raylet = subprocess.Popen(command, executable="/bin/sh", stdout=subprocess.PIPE, text=True)
    assert raylet.stdout is not None
    worker = psutil.Process(int(raylet.stdout.readline()))
    yield raylet.pid, worker.pid
    raylet.kill()
    raylet.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        worker.kill()
    raylet.stdout.close()


def test_a_process_that_is_not_the_node_s_is_left_alone(node: tuple[int, int]) -> None:
    """Also all others of the call: process ids are used again."""
    with subprocess.Popen(["sleep", "60"]) as stranger:
        problem = signal_ranks(NODE_ID, [node[1], stranger.pid], signal.SIGKILL)
        assert problem is not None and str(stranger.pid) in problem
        assert stranger.poll() is None and psutil.Process(node[1]).is_running()
        stranger.kill()
    gone = signal_ranks(NODE_ID, [stranger.pid], signal.SIGKILL)
    assert gone is not None and str(stranger.pid) in gone
