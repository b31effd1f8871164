"""Which processes belong to an embedded cluster, and how they are ended.

Every process of a cluster carries ``EVERSTEP_CLUSTER_DIR`` in its environment, whose value (the
cluster's temporary directory) is unique for ever. That tells a process from one that merely got the
same pid, whatever the clock did. Ray's agents and the parts of its dashboard overwrite their own
environment with a title; they are known by that title and by the log files that they hold open.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import psutil

CLUSTER_DIR_VARIABLE = "EVERSTEP_CLUSTER_DIR"
_MOST_ROUNDS = 4
"""In which only processes were found that had been sent SIGKILL before."""
logger = logging.getLogger(__name__)
RAY_TITLES = ("ray::", "ray-dashboard-")
"""With which those of Ray's processes begin that overwrite their environment."""


def belongs(process: psutil.Process, temp_dir: str) -> bool:
    """Whether a live process is one of the cluster in ``temp_dir``."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        marker = process.environ().get(CLUSTER_DIR_VARIABLE)
        if marker is not None:
            return marker == temp_dir
        return (
            process.cmdline()[:1] != []
            and process.cmdline()[0].startswith(RAY_TITLES)
            and _holds_files_below(process, temp_dir)
        )
    except (psutil.NoSuchProcess, psutil.AccessDenied, IndexError):
        return False


def lives(pid: int | None, temp_dir: str) -> bool:
    """Whether ``pid`` is a live process of the cluster in ``temp_dir``, not another that got its
    number."""
    if pid is None:
        return False
    try:
        return belongs(psutil.Process(pid), temp_dir)
    except psutil.NoSuchProcess:
        return False


def started_at(pid: int) -> float:
    """Start of a process in unix seconds; 0 where it is gone."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return 0.0


def members(temp_dir: str, *, without: Sequence[int] = ()) -> Iterator[psutil.Process]:
    """Every live process of the cluster in ``temp_dir``, but for the pids in ``without``."""
    for process in psutil.process_iter():
        if process.pid not in without and belongs(process, temp_dir):
            yield process


def end_members(temp_dir: str, *, grace_s: float, without: Sequence[int] = ()) -> int:
    """SIGTERM, then after ``grace_s`` SIGKILL, until no process of the cluster is left; returns how
    many there were.

    Looks again after each round: a process may have started another while it was being ended. One
    that outlives SIGKILL, in a call of the kernel that does not return, is left behind: a new
    cluster has another directory, and is not disturbed by it.
    """
    ended: set[int] = set()
    num_old = 0
    while found := list(members(temp_dir, without=without)):
        num_old = num_old + 1 if {process.pid for process in found} <= ended else 0
        if num_old > _MOST_ROUNDS:
            logger.warning(
                "processes %s cannot be killed; they are left",
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


def _signal_all(processes: Sequence[psutil.Process], *, terminate: bool) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate() if terminate else process.kill()


def _holds_files_below(process: psutil.Process, directory: str) -> bool:
    return any(file.path.startswith(f"{directory}/") for file in process.open_files())
