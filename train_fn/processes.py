"""How a rank's threads and processes stand to each other and to the rest of the host: who runs first, and who ends with whom."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

RANK_NICENESS = -10
"""Ranks run before what only keeps the cluster and the run in order: a rank that waits for a core makes all its peers wait."""
WRITER_NICENESS = 10
"""By how much what writes checkpoints stands back behind training: where ranks fill a host's cores, it takes what they leave."""
NODE_CORES_VARIABLE = "EVERSTEP_NODE_CORES"
"""Numbers of the cores that are this node's own, with commas between: the embedded cluster's nodes have such (its keeper)."""

_PR_SET_PDEATHSIG = 1


def take_precedence() -> None:
    """Raise the priority of this process, where the system permits it (root, or CAP_SYS_NICE), and keep to its node's own cores,
    where it has such."""
    cores = [int(core) for core in os.environ.get(NODE_CORES_VARIABLE, "").split(",") if core]
    for thread in _threads_of("self") or [0]:
        with contextlib.suppress(OSError):  # not permitted, or a thread that has just ended
            os.setpriority(os.PRIO_PROCESS, thread, RANK_NICENESS)
        if cores:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, cores)


def stand_back() -> None:
    """Let the calling thread run after the rank's others; what it starts as well."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.nice(WRITER_NICENESS)


def leave_own_cores(pid: int) -> None:
    """Let a process that a rank has started run on every core of the host that this rank's own starter may use."""
    if NODE_CORES_VARIABLE in os.environ:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(pid, os.sched_getaffinity(os.getppid()))


def set_idle(pid: int, *, idle: bool) -> None:
    """Put all threads of a process into Linux's class IDLE, where they run when nothing else would, or back; see ``may_idle``."""
    for thread in _threads_of(str(pid)):
        with contextlib.suppress(OSError):  # it has just ended
            os.sched_setscheduler(thread, os.SCHED_IDLE if idle else os.SCHED_OTHER, os.sched_param(0))


def may_idle() -> bool:
    """Whether a process of class IDLE can be put back, for which the system asks a privilege (root, or CAP_SYS_NICE)."""
    if not hasattr(os, "SCHED_IDLE"):
        return False
    came_back: list[bool] = []

    def try_it() -> None:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            came_back.append(True)

    trial = threading.Thread(target=try_it)  # a thread of its own: where it cannot be put back, it stays there
    trial.start()
    trial.join()
    return bool(came_back)


def end_with_starter() -> None:
    """Have the kernel kill this process when the thread that started it ends, however that happens.

    By itself it would find out only seconds later, with its memory still taken, and never while it is stopped.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _threads_of(pid: str) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    return []
