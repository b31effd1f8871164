"""The precedence of ranks over the control processes of the cluster, which share their cores.

A low priority is not enough. A process that mostly sleeps runs at once when it wakes up, in the
middle of a rank's step, and all peers of the rank wait. A process of Linux's class IDLE runs only
when nothing else would, for example while ranks wait for each other in a step. Beside ranks that
never wait it gets a turn in ten seconds. So all control processes run in the normal class, at a low
priority, for a while

- once one of them gets no CPU time: a probe, which does nothing but wake up, stands for threads and
  processes that nobody looks at;
- once a node dies, or a run is submitted, since a recovery and a first step need them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from service.embedded.processes import CLUSTER_DIR_VARIABLE, belongs, lives, members

CONTROL_NICENESS = 5
"""Niceness of control processes. Ranks run at -10, or at 0 without the privilege for that."""
LOOK_S = 0.5
"""Seconds between two checks. A process that waits for a core from one to the next is starved, so
none waits for longer than twice that."""
FIRST_RESPITE_S = 60.0
"""Seconds in the normal class after a process starved. They double if another one starves soon
after."""
LONGEST_RESPITE_S = 960.0
RECOVERY_S = 15.0
"""Seconds in the normal class after a node died."""
SUBMISSION_S = 30.0
"""Seconds in the normal class after a run was submitted: the way to its first step leads through a
dozen control processes."""
_PROBE = "import select, sys\nwhile not select.select([sys.stdin], [], [], 0.1)[0]: pass"
"""Wakes up until its parent ends."""

log = logging.getLogger(__name__)


class Turn(NamedTuple):
    """The kernel's account of a process's first thread."""

    wants: bool
    """Whether it runs or waits for a core."""
    ran_ns: int
    """Total run time."""


class Precedence:
    """Lets ranks run before the control processes of the cluster in ``temp_dir``."""

    def __init__(self, temp_dir: str) -> None:
        self._temp_dir = temp_dir
        self._lock = threading.Lock()
        self._policy = os.SCHED_OTHER
        self._yielding: set[int] = set()
        self._asked = threading.Event()
        self._needed_until = 0.0
        """By ``time.monotonic``."""
        self._probe: subprocess.Popen[bytes] | None = None

    def give_way(self, pids: Iterable[int]) -> None:
        """Lower the precedence of processes and all their descendants, also later ones."""
        with self._lock:
            for pid in pids:
                with contextlib.suppress(psutil.NoSuchProcess):
                    parent = psutil.Process(pid)
                    for process in (parent, *parent.children(recursive=True)):
                        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                            process.nice(max(CONTROL_NICENESS, process.nice()))
                            self._set_class(process.pid)

    def let_run(self, seconds: float = RECOVERY_S) -> None:
        """Let the control processes run in the normal class for so long from now: something waits
        for them."""
        self._needed_until = time.monotonic() + seconds
        self._asked.set()

    def keep(self) -> None:
        """Keep the control processes in class IDLE while none starves and nothing waits for them.
        Runs forever, on a thread.

        Returns at once, without a change, if this process lacks the privilege.
        """
        if not _may_leave_idle():
            return
        respite_s = 0.0
        while True:
            self._change_all(os.SCHED_IDLE)
            began = time.monotonic()
            late = self._wait_for_need()
            self._change_all(os.SCHED_OTHER)
            if late is None:
                self._rest(0.0)
                continue
            lasted_s = time.monotonic() - began
            respite_s = (
                min(2 * respite_s, LONGEST_RESPITE_S) if lasted_s < respite_s else FIRST_RESPITE_S
            )
            log.info(
                "process %d got no CPU time beside the ranks; all run in the normal class for %g s",
                late,
                respite_s,
            )
            self._rest(respite_s)

    def _change_all(self, policy: int) -> None:
        with self._lock:
            known, self._policy, self._yielding = self._yielding, policy, set()
            self._take_in(known)  # at once: to find the others takes a moment
            self._take_in(process.pid for process in members(self._temp_dir))

    def _take_in(self, pids: Iterable[int]) -> None:
        """Change the class of those that are control processes of the cluster."""
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.nice() == CONTROL_NICENESS and belongs(process, self._temp_dir):
                    self._set_class(pid)

    def _set_class(self, pid: int) -> None:
        """Change all threads of a process, also those that others start meanwhile."""
        self._yielding.add(pid)
        with contextlib.suppress(OSError):  # The process has ended.
            threads = Path(f"/proc/{pid}/task")
            while any([self._changes(int(each.name)) for each in list(threads.iterdir())]):
                pass

    def _changes(self, thread: int) -> bool:
        """Change a thread. Return whether it was in another class before."""
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(thread) != self._policy:
                os.sched_setscheduler(thread, self._policy, os.sched_param(0))
                return True
        return False

    def _wait_for_need(self) -> int | None:
        """Return a process that starves, or None once something waits for control processes."""
        before: dict[int, Turn] = {}
        while True:
            self._keep_probe()
            self._find_born()
            with self._lock:
                pids = sorted(self._yielding)
            turns = dict(_turns(pids))
            if late := starved(before, turns):
                return late[0]
            before = turns
            if self._asked.wait(LOOK_S):
                return None

    def _rest(self, respite_s: float) -> None:
        """Wait for that time, and while something waits for control processes."""
        self._asked.clear()
        rests_until = time.monotonic() + respite_s
        while time.monotonic() < max(rests_until, self._needed_until):
            self._find_born()
            time.sleep(LOOK_S)

    def _find_born(self) -> None:
        """Take in the control processes that began in class IDLE since the last change.

        One whose parent was in that class when it asked for it may begin there after the change.
        """
        pids = set(psutil.pids())
        with self._lock:
            self._yielding &= pids
            self._take_in(filter(_is_idle, pids - self._yielding))

    def _keep_probe(self) -> None:
        """Start the probe, or another one in place of one that has ended."""
        if self._probe is None or not lives(self._probe.pid, self._temp_dir):
            command = [sys.executable, "-I", "-S", "-c", _PROBE]
            env = {**os.environ, CLUSTER_DIR_VARIABLE: self._temp_dir}
            self._probe = subprocess.Popen(command, stdin=subprocess.PIPE, env=env)
            self.give_way([self._probe.pid])


def _is_idle(pid: int) -> bool:
    try:
        return os.sched_getscheduler(pid) == os.SCHED_IDLE
    except OSError:
        return False


def starved(before: Mapping[int, Turn], now: Mapping[int, Turn]) -> list[int]:
    """Return the processes that wanted to run at both checks and did not run between them."""
    return [pid for pid, turn in now.items() if turn.wants and before.get(pid) == turn]


def _turns(pids: Sequence[int]) -> Iterator[tuple[int, Turn]]:
    """Yield the turn of each live process. Source: proc(5) and Linux's documentation of
    schedstat."""
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            ran_ns = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
            yield pid, Turn(state == "R", int(ran_ns))


def _may_leave_idle() -> bool:
    """Return whether class IDLE can be used here.

    Leaving the class needs a privilege, the run time must be readable, and this process's niceness
    must differ from that of control processes. Without the privilege the calling thread stays in
    the class.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) >= CONTROL_NICENESS:
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except OSError:
        return False
    return any(turn.ran_ns for _, turn in _turns([os.getpid()]))
