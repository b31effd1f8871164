"""Faults on one node, on real processes: a stand-in for a raylet with a worker below it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from train_fn.drills import find_raylet, kill_ranks, kill_raylet, signal_ranks
from train_fn.node.node_dir import snapshots_dir
from train_fn.ray_train.group.node_checks import signalled, stopped

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


def wait_for_status(pid: int, *wanted: str) -> None:
    deadline = time.monotonic() + 60
    while psutil.Process(pid).status() not in wanted:
        assert time.monotonic() < deadline, f"process {pid} is {psutil.Process(pid).status()}"
        time.sleep(0.01)


def test_a_raylet_is_known_by_its_node(node: tuple[int, int]) -> None:
    raylet = find_raylet(NODE_ID)
    assert raylet is not None and raylet.pid == node[0]
    assert find_raylet(NODE_ID[:-1]) is None
    assert kill_raylet("no-such-node") == "no raylet of node no-such-node runs here"


def test_a_rank_is_stopped_goes_on_and_is_killed(node: tuple[int, int]) -> None:
    _, pid = node
    assert signal_ranks(NODE_ID, [pid], signal.SIGSTOP) is None
    wait_for_status(pid, psutil.STATUS_STOPPED)
    assert signal_ranks(NODE_ID, [pid], signal.SIGCONT) is None
    wait_for_status(pid, psutil.STATUS_SLEEPING)
    left = snapshots_dir("run_of_this_test")
    left.mkdir(exist_ok=True)
    (left / "state.pt").write_bytes(b"state")
    worker = psutil.Process(pid)
    assert kill_ranks("run_of_this_test", NODE_ID, [pid]) is None
    worker.wait(60)
    assert not left.exists()


def test_a_process_that_is_not_the_node_s_is_left_alone(node: tuple[int, int]) -> None:
    """Also all others of the call: process ids are used again."""
    with subprocess.Popen(["sleep", "60"]) as stranger:
        problem = signal_ranks(NODE_ID, [node[1], stranger.pid], signal.SIGKILL)
        assert problem is not None and str(stranger.pid) in problem
        assert stranger.poll() is None and psutil.Process(node[1]).is_running()
        stranger.kill()
    gone = signal_ranks(NODE_ID, [stranger.pid], signal.SIGKILL)
    assert gone is not None and str(stranger.pid) in gone


def test_a_node_is_killed_by_its_raylet(node: tuple[int, int]) -> None:
    assert kill_raylet(NODE_ID) is None
    wait_for_status(node[0], psutil.STATUS_ZOMBIE)


def test_those_that_are_stopped_are_found_and_go_on(node: tuple[int, int]) -> None:
    raylet, pid = node
    assert stopped([raylet, pid]) == []
    psutil.Process(pid).suspend()
    wait_for_status(pid, psutil.STATUS_STOPPED)
    assert signalled([raylet, pid], signal.SIGCONT) == [pid]
    wait_for_status(pid, psutil.STATUS_SLEEPING)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    assert signalled([gone.pid], signal.SIGCONT) == []
