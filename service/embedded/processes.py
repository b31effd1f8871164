"""The processes of an embedded cluster: find them, wait for them, end them.

Each process of a cluster has ``EVERSTEP_CLUSTER_DIR`` in its environment. Its value, the cluster's
temporary directory, is never used twice, so it tells a process from another one with a reused pid.
Ray's agents and the parts of its dashboard overwrite their environment with a title. They are found
by that title and by the log files that they hold open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator, Sequence

import psutil

CLUSTER_DIR_VARIABLE = "EVERSTEP_CLUSTER_DIR"
CONTROL_NICENESS = 5
"""Niceness of control processes. Ranks run at -10, or at 0 without the privilege for that."""
_MOST_ROUNDS = 4
"""Rounds with only processes that were killed before; then they are given up."""
_EXEC_S, _EXEC_POLL_S = 5.0, 0.01
"""Longest wait for processes in the middle of an ``execve``, and the seconds between two checks."""
logger = logging.getLogger(__name__)
RAY_TITLES = ("ray::", "ray-dashboard-")
"""Prefixes of the titles of Ray's processes that overwrite their environment."""


def belongs(process: psutil.Process, temp_dir: str) -> bool:
    """Return whether a live process is part of the cluster in ``temp_dir``."""
    return _is_member(process, temp_dir) is True


def lives(pid: int | None, temp_dir: str) -> bool:
    """Return whether ``pid`` is a live process of the cluster in ``temp_dir``, and not reused."""
    if pid is None:
        return False
    try:
        return belongs(psutil.Process(pid), temp_dir)
    except psutil.NoSuchProcess:
        return False


def members(temp_dir: str, *, without: Sequence[int] = ()) -> Iterator[psutil.Process]:
    """Yield every live process of the cluster in ``temp_dir`` except the pids in ``without``.

    Wait for processes that another program is just being loaded into: nobody can tell whose they
    are.
    """
    deadline = time.monotonic() + _EXEC_S
    left = [process for process in psutil.process_iter() if process.pid not in without]
    while left:
        unknown = []
        for process in left:
            is_member = _is_member(process, temp_dir)
            if is_member is None:
                unknown.append(process)
            elif is_member:
                yield process
        if time.monotonic() > deadline:
            return
        if left := unknown:
            time.sleep(_EXEC_POLL_S)


def end_members(temp_dir: str, *, grace_s: float, without: Sequence[int] = ()) -> int:
    """End every process of the cluster: SIGTERM, then SIGKILL after ``grace_s``. Return their
    number.

    Each round searches again, since a process may start another one while it ends. A process that
    survives SIGKILL hangs in the kernel and is left behind. It does not disturb a new cluster,
    which has another directory.
    """
    ended: set[int] = set()
    num_old = 0
    # Twice: a process may end while it is looked at, and have started another one just before.
    while found := [*members(temp_dir, without=without)] or [*members(temp_dir, without=without)]:
        num_old = num_old + 1 if {process.pid for process in found} <= ended else 0
        if num_old > _MOST_ROUNDS:
            logger.warning(
                "processes %s cannot be killed and are left behind",
                sorted(process.pid for process in found),
            )
            break
        ended.update(process.pid for process in found)
        _signal_all(found, terminate=grace_s > 0)
        _, alive = psutil.wait_procs(found, timeout=grace_s)
        _signal_all([process for process in alive if belongs(process, temp_dir)], terminate=False)
        psutil.wait_procs(alive, timeout=5)
        grace_s = 0
    return len(ended)


def end_node(temp_dir: str, slot: int) -> None:
    """Kill whatever was started for the node in a slot."""
    for process in list(members(temp_dir, without=(os.getpid(),))):
        with contextlib.suppress(psutil.Error):
            if any(f"/n{slot}." in part for part in process.cmdline()):
                kill_all([process.pid, *(child.pid for child in process.children(recursive=True))])


def _is_member(process: psutil.Process, temp_dir: str) -> bool | None:
    """Like ``belongs``, or None in the middle of an ``execve``.

    Linux then shows neither environment nor arguments. On a machine with busy disks that may last a
    second: a raylet's child that outlived the raylet was missed, and stayed.
    """
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        environ, arguments = process.environ(), process.cmdline()
        if CLUSTER_DIR_VARIABLE in environ:
            return environ[CLUSTER_DIR_VARIABLE] == temp_dir
        if arguments and arguments[0].startswith(RAY_TITLES):
            return any(file.path.startswith(f"{temp_dir}/") for file in process.open_files())
        # The arguments may be those before or after. A kernel thread and a process that is ending
        # have no program.
        is_new = not arguments or time.time() - process.create_time() < _EXEC_S
        return None if not environ and is_new and process.exe() else False
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _signal_all(processes: Sequence[psutil.Process], *, terminate: bool) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate() if terminate else process.kill()


def wait_for_end(pids: Sequence[int], woken: int, timeout_s: float) -> bool:
    """Wait until one of the processes ends, ``woken`` can be read, or ``timeout_s`` passes.

    Returns False at once if one of the processes is gone already.
    """
    with contextlib.ExitStack() as opened:
        poll = select.poll()
        poll.register(woken, select.POLLIN)
        for pid in pids:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                return False
            opened.callback(os.close, pidfd)
            poll.register(pidfd, select.POLLIN)
        poll.poll(1000 * timeout_s)
    return True


def give_way(pids: Iterable[int]) -> None:
    """Let ranks run before these control processes and all that they start later."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(pid)
            for process in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    process.nice(max(CONTROL_NICENESS, process.nice()))


def kill_all(pids: Sequence[int]) -> None:
    """Send SIGKILL to processes. Those that are gone are ignored."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap_children() -> None:
    """Collect the exit status of ended children, which would stay as zombies."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
