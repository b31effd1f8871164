"""Processes that only keep the cluster and its runs in order give way to the ranks, whose cores
they share.

A low priority alone does not do it: a process that sleeps most of the time runs at once when it
wakes up, in the middle of a rank's step, and the rank's peers wait with it. A process of Linux's
class IDLE runs where nothing else would: where ranks wait for each other, which they do in every
step. Ranks that never wait would leave it next to nothing, so that whether these processes get
their
turn is watched: as soon as one does not, all of them are as any other process for a while, at a low
priority.
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
"""Of the processes that give way: ranks run at -10, or at 0 where the system does not let them
raise themselves."""
LOOK_S = 0.5
"""Between two looks. A process that has waited for a core from one to the next has waited too
long."""
FIRST_RESPITE_S = 60.0
"""How long the processes are then as any other; twice as long each time that the next one waits too
long soon after."""
LONGEST_RESPITE_S = 960.0

log = logging.getLogger(__name__)


class Turn(NamedTuple):
    """What the kernel says of a process's first thread."""

    wants: bool
    """Whether it runs, or waits for a core."""
    ran_ns: int
    """How long it has run so far."""


class Precedence:
    """Of the ranks before the other processes of the cluster in ``temp_dir``."""

    def __init__(self, temp_dir: str) -> None:
        self._temp_dir = temp_dir
        self._lock = threading.Lock()
        self._policy = os.SCHED_OTHER
        self._yielding: set[int] = set()

    def give_way(self, pids: Iterable[int]) -> None:
        """Let processes and all that descends from them give way, now and in what they start
        later."""
        with self._lock:
            for pid in pids:
                with contextlib.suppress(psutil.NoSuchProcess):
                    parent = psutil.Process(pid)
                    for process in (parent, *parent.children(recursive=True)):
                        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                            process.nice(max(CONTROL_NICENESS, process.nice()))
                            self._set_class(process.pid)

    def keep(self) -> None:
        """On a thread, for good: have those that give way run where ranks wait, as long as they get
        their turn there.

        Returns where that cannot be done, and leaves them as they are.
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
                "process %d did not get its turn beside the ranks; none gives way as much for %g s",
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
        with contextlib.suppress(OSError):  # it has ended
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
    """Processes that wanted to run at both looks, and have not run between them."""
    return [pid for pid, turn in now.items() if turn.wants and before.get(pid) == turn]


def _turns(pids: Sequence[int]) -> Iterator[tuple[int, Turn]]:
    """Of each process that lives. Source: proc(5) and Linux's documentation of schedstat."""
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            ran_ns = Path(f"/proc/{pid}/schedstat").read_text().split()[0]
            yield pid, Turn(state == "R", int(ran_ns))


def _may_leave_idle() -> bool:
    """Whether a process of class IDLE may be put back, which needs a privilege, and its run time
    can be read; and whether its niceness tells what gives way from the rest.

    Where it may not be put back, the thread that asks stays in that class.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) >= CONTROL_NICENESS:
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except OSError:
        return False
    return any(turn.ran_ns for _, turn in _turns([os.getpid()]))
