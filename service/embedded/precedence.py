"""The precedence of ranks over the control processes of the cluster, which share their cores.

A low priority is not enough. A process that mostly sleeps runs at once when it wakes up, in the
middle of a rank's step, and all peers of the rank wait. A process of Linux's class IDLE runs only
when nothing else would, for example while ranks wait for each other in a step. Ranks that never
wait would starve it. So this module watches whether control processes get CPU time. If one does
not, all of them run in the normal class at a low priority for a while.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from service.embedded.processes import members

CONTROL_NICENESS = 5
"""Niceness of control processes. Ranks run at -10, or at 0 without the privilege for that."""
LOOK_S = 0.5
"""Seconds between two checks. A process that waits for a core from one to the next is starved."""
FIRST_RESPITE_S = 60.0
"""Seconds in the normal class after a process starved. They double if another one starves soon
after."""
LONGEST_RESPITE_S = 960.0

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

    def keep(self) -> None:
        """Keep the control processes in class IDLE while none starves. Runs forever, on a thread.

        Returns at once, without a change, if this process lacks the privilege.
        """
        if not _may_leave_idle():
            return
        respite_s = 0.0
        while True:
            self._change_all(os.SCHED_IDLE)
            began = time.monotonic()
            late = self._wait_for_starved()
            lasted_s = time.monotonic() - began
            respite_s = (
                min(2 * respite_s, LONGEST_RESPITE_S) if lasted_s < respite_s else FIRST_RESPITE_S
            )
            self._change_all(os.SCHED_OTHER)
            log.info(
                "process %d got no CPU time beside the ranks; all run in the normal class for %g s",
                late,
                respite_s,
            )
            time.sleep(respite_s)

    def _change_all(self, policy: int) -> None:
        with self._lock:
            self._policy, self._yielding = policy, set()
            for process in members(self._temp_dir):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.nice() == CONTROL_NICENESS:
                        self._set_class(process.pid)

    def _set_class(self, pid: int) -> None:
        self._yielding.add(pid)
        with contextlib.suppress(OSError):  # The process has ended.
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    os.sched_setscheduler(int(thread.name), self._policy, os.sched_param(0))

    def _wait_for_starved(self) -> int:
        before: dict[int, Turn] = {}
        while True:
            with self._lock:
                pids = sorted(self._yielding)
            turns = dict(_turns(pids))
            if late := starved(before, turns):
                return late[0]
            before = turns
            time.sleep(LOOK_S)


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
