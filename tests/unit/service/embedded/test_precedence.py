"""What keeps order gives way to the ranks, as long as it gets its turn all the same. Real processes
on one core."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from service.embedded.precedence import CONTROL_NICENESS, Turn, starved
from service.embedded.processes import CLUSTER_DIR_VARIABLE
from tests.support.service_process import wait_for

ROOT = Path(__file__).parents[4]
CONTROL = (
    "import os, time; os.sched_setaffinity(0, {%d})\nwhile True: time.sleep(0.01); "
    "sum(range(100_000))"
)
RANK = (
    "import os; os.sched_setaffinity(0, {%d}); os.setpriority(os.PRIO_PROCESS, 0, -10)\nwhile "
    "True: pass"
)
BUSY_THREAD = (
    "import os, threading, time; os.sched_setaffinity(0, {%d})\ndef work():\n while True: "
    "time.sleep(0.01); sum(range(100_000))\nthreading.Thread(target=work).start()"
)
"""A process whose first thread waits for ever, as that of an actor does."""
BORN_IDLE = (
    "import os, time; os.setpriority(os.PRIO_PROCESS, 0, %d); "
    "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); time.sleep(600)"
)
KEEPER = """
import os, sys, threading
from service.embedded import precedence
precedence.FIRST_RESPITE_S = precedence.LONGEST_RESPITE_S = 0.5
kept = precedence.Precedence(sys.argv[1])
kept.give_way(map(int, sys.argv[2:]))
told = lambda: [kept.let_run(float(told)) for told in iter(lambda: os.read(0, 64), b"")]
threading.Thread(target=told, daemon=True).start()
kept.keep()
"""
needs_privilege = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may let a process out of class IDLE again"
)


class Processes:
    """Python processes on one core, ended with the test."""

    def __init__(self, temp_dir: Path) -> None:
        self.core = min(os.sched_getaffinity(0))
        self.temp_dir = temp_dir
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, script: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", script, *arguments]
        environ = {**os.environ, **(env or {})}
        self._started.append(
            subprocess.Popen(command, env=environ, cwd=ROOT, stdin=subprocess.PIPE)
        )
        return self._started[-1]

    def start_member(self, script: str) -> psutil.Process:
        """A process of the cluster."""
        return psutil.Process(
            self.start(script, env={CLUSTER_DIR_VARIABLE: str(self.temp_dir)}).pid
        )

    def start_control(self) -> psutil.Process:
        """A process of the cluster that wakes up every 10 ms, to do something."""
        return self.start_member(CONTROL % self.core)

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.end()


def policy(process: psutil.Process) -> int:
    return os.sched_getscheduler(process.pid)


def classes(process: psutil.Process) -> set[int]:
    """Of all its threads."""
    return {os.sched_getscheduler(thread.id) for thread in process.threads()}


def tell(keeper: subprocess.Popen[bytes], seconds: bytes) -> None:
    """Let what keeps order run in the normal class for so long."""
    assert keeper.stdin is not None
    keeper.stdin.write(seconds + b"\n")
    keeper.stdin.flush()


@needs_privilege
def test_a_process_gives_way_until_ranks_leave_it_no_turn(processes: Processes) -> None:
    control = processes.start_control()
    processes.start(KEEPER, str(processes.temp_dir), str(control.pid))
    wait_for(lambda: policy(control) == os.SCHED_IDLE, 60, "the process to give way")
    assert control.nice() == CONTROL_NICENESS

    rank = processes.start(RANK % processes.core)
    wait_for(
        lambda: policy(control) == os.SCHED_OTHER,
        60,
        "the process to be let out where a rank never waits",
    )
    ran_s = sum(control.cpu_times()[:2])
    wait_for(lambda: sum(control.cpu_times()[:2]) > ran_s, 60, "the process to run beside the rank")
    rank.kill()
    wait_for(lambda: policy(control) == os.SCHED_IDLE, 60, "the process to give way again")
    assert control.nice() == CONTROL_NICENESS


@needs_privilege
def test_a_thread_that_nobody_looks_at_is_let_out_with_its_process(processes: Processes) -> None:
    control = processes.start_member(BUSY_THREAD % processes.core)
    wait_for(lambda: control.num_threads() == 2, 60, "its second thread")
    on_its_core = f"import os; os.sched_setaffinity(0, {{{processes.core}}})\n{KEEPER}"
    processes.start(on_its_core, str(processes.temp_dir), str(control.pid))
    wait_for(lambda: classes(control) == {os.SCHED_IDLE}, 60, "the process to give way")

    processes.start(RANK % processes.core)
    wait_for(
        lambda: classes(control) == {os.SCHED_OTHER},
        60,
        "a process to be let out whose second thread gets no turn",
    )


@needs_privilege
def test_control_processes_run_at_once_while_something_waits_for_them(
    processes: Processes,
) -> None:
    control = processes.start_control()
    keeper = processes.start(KEEPER, str(processes.temp_dir), str(control.pid))
    wait_for(lambda: policy(control) == os.SCHED_IDLE, 60, "the process to give way")
    tell(keeper, b"600")
    wait_for(lambda: policy(control) == os.SCHED_OTHER, 60, "the process to be let out")

    late = processes.start_member(BORN_IDLE % CONTROL_NICENESS)
    wait_for(lambda: late.nice() == CONTROL_NICENESS, 60, "a process of a parent in class IDLE")
    wait_for(lambda: policy(late) == os.SCHED_OTHER, 60, "it to be let out as well")
    tell(keeper, b"0")
    wait_for(lambda: policy(control) == policy(late) == os.SCHED_IDLE, 60, "both to give way again")


@needs_privilege
def test_what_is_not_of_the_cluster_or_does_not_give_way_is_left_alone(
    processes: Processes,
) -> None:
    stranger = psutil.Process(processes.start(CONTROL % processes.core).pid)
    stranger.nice(CONTROL_NICENESS)
    # the latter is looked at last
    raylet, control = processes.start_control(), processes.start_control()
    processes.start(KEEPER, str(processes.temp_dir), str(control.pid))
    wait_for(lambda: policy(control) == os.SCHED_IDLE, 60, "the process to give way")
    assert (policy(raylet), raylet.nice()) == (os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, 0))
    assert policy(stranger) == os.SCHED_OTHER


def test_a_cluster_that_was_started_at_a_low_priority_is_left_as_it_is(
    processes: Processes,
) -> None:
    """Its ranks could not be told from what gives way to them; nor could they be without a
    privilege."""
    control = processes.start_control()
    low = f"import os; os.setpriority(os.PRIO_PROCESS, 0, {CONTROL_NICENESS})\n{KEEPER}"
    assert processes.start(low, str(processes.temp_dir), str(control.pid)).wait(60) == 0
    assert policy(control) == os.SCHED_OTHER


def test_who_wants_to_run_and_does_not_is_starved() -> None:
    before = {1: Turn(True, 5), 2: Turn(False, 5), 3: Turn(True, 5), 4: Turn(True, 5)}
    now = {
        1: Turn(True, 5),
        2: Turn(True, 5),
        3: Turn(True, 6),
        4: Turn(False, 5),
        5: Turn(True, 5),
    }
    assert starved(before, now) == [1]
    assert starved({}, now) == []
