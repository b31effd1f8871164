"""Build a run's task once on a node, in a process that never trains and from which ranks are
forked; and find out whether what was built may be shared so.

A fork has the memory of the process that has built, and its file descriptors. It has no other
thread of it, and cannot use a device that is open there. So whatever was built may be shared unless
it has left a thread, a child, an open file or a device. Then each rank builds for itself. Locks of
multiprocessing, which lie in memory that forks share, are made anew in each rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from train_fn.errors import few
from train_fn.journal.rank_log import put_tees
from train_fn.node.secrets import process_redactor, read_secrets
from train_fn.ranks.line import BuildOrder, BuildResult
from train_fn.ranks.zygote import LONELY_S, Zygote, begin_anew, end_after, listen_at, show_as
from train_fn.recovery.launch import RankJob
from train_fn.recovery.settings import take_environment
from train_fn.step.place_watch import asked_at, watching

_LONGEST = 500
_PR_SET_CHILD_SUBREAPER = 36


base_environ: dict[str, str] | None = None
"""The environment with which this process has begun to build; None if it has not built."""
output: OutputFile | None = None
"""What was printed while this process built; None if it has not built."""


def build_and_serve(connection: Connection, order: BuildOrder) -> None:
    """Build the task, tell the host what came of it, and fork ranks until nobody is connected."""
    global base_environ, output
    os.setpgid(0, 0)  # what it starts ends with it, if its host is gone
    begin_anew(order.streams)
    began, threads, fds = time.monotonic(), _threads(), set(_descriptors())
    output = OutputFile(order.path.with_suffix(".log"))
    os.environ.clear()
    os.environ.update(order.environ)
    base_environ = {**order.environ, **order.env}
    show_as(["everstep-build", order.job.run_dir.run_id])
    own_fds = fds | {*output.descriptors, connection.fileno()}
    why_not = failed = None
    _take_orphans(True)
    try:
        take_environment(order.env)
        why_not = _build(order.job) or _why_not(threads, own_fds)
    except BaseException as exc:
        failed = process_redactor()(f"{type(exc).__name__}: {exc}")[:_LONGEST]
    for stream in (sys.stdout, sys.stderr):  # else each fork would print it again
        stream.flush()
    if why_not or failed:
        _end_children()
    _take_orphans(False)
    listening = None if why_not or failed else listen_at(order.path)
    connection.send(BuildResult(why_not, failed, time.monotonic() - began))
    if listening is None:
        return
    connection.close()
    locks = SharedLocks()
    fork = Zygote(listening, LONELY_S).serve()
    if fork is not None:
        locks.renew()
        end_after(_enter, fork)
    for path in (order.path, output.path):
        path.unlink(missing_ok=True)


def _enter(connection: Connection) -> None:
    from train_fn.ranks.main import be_rank

    _, *rest = connection.recv()
    be_rank(connection, *rest)


def _build(job: RankJob) -> str | None:
    """Build. Return why ranks must not begin with it, as far as the build says."""
    secrets = read_secrets(job.spec, os.environ)
    process_redactor().learn(secrets.values())
    os.environ.update(secrets)
    try:
        name, _, _ = job.train.partition(":")
        build: Callable[..., str | None] | None = getattr(
            importlib.import_module(name), "build_once", None
        )
        device = torch.device("cuda", 0) if job.use_gpu else torch.device("cpu")
        if build is not None:
            with _group_of_one(), watching():
                return build(job.spec, job.run_dir, device)
        return None
    finally:
        for variable in secrets:
            os.environ.pop(variable, None)


@contextlib.contextmanager
def _group_of_one() -> Iterator[None]:
    """Have a process group inside, as every rank has. That there is one says nothing of peers."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _why_not(threads: Collection[int], fds: Collection[int]) -> str | None:
    """Return why this process cannot be forked into ranks; None if it can."""
    if (place := asked_at()) is not None:
        return f"the build asks for its rank or its peers ({place})"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return (
            "the build has used the GPU; return the model on the CPU, and each rank moves it to "
            "its device"
        )
    if new := _threads() - set(threads):
        names = few(sorted(map(_thread_name, new)))
        return (
            f"the build has left {len(new)} threads running ({names}); start them where a batch "
            "is read, in __getitem__ or collate"
        )
    if children := sorted(map(str, _children())):
        return f"the build has left processes running ({few(children)}); end them there"
    found = _descriptors().items()
    opened = sorted(path for fd, path in found if fd not in fds and not _is_mapped(fd))
    if opened:
        return (
            f"the build has left files open ({few(opened)}), whose place ranks would share; open "
            "them where a sample is read, in __getitem__"
        )
    return None


class SharedLocks:
    """The locks and semaphores of multiprocessing that this process has made, as progress bars do,
    with their values."""

    def __init__(self) -> None:
        made: Any = sys.modules.get("multiprocessing.synchronize")
        found: list[Any] = [] if made is None else gc.get_objects()
        self._semaphores = [
            (each, each._semlock._get_value())
            for each in found
            if issubclass(type(each), made.SemLock)
        ]
        self._conditions = [each for each in found if issubclass(type(each), made.Condition)]

    def renew(self) -> None:
        """Put new ones in their places, in a fork. A rank that is killed while it holds one that
        all forks share would stop them for ever."""
        for each, value in self._semaphores:
            old = each._semlock
            name = each._make_name()
            each._semlock = type(old)(old.kind, value, old.maxvalue, name, True)
            each._make_methods()
        for each in self._conditions:
            each._make_methods()


def _threads() -> set[int]:
    """Return the threads of this process, also those that Python knows nothing of."""
    return {int(entry.name) for entry in Path("/proc/self/task").iterdir()}


def _thread_name(number: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/self/task/{number}/comm").read_text().strip()
    return "?"


def _take_orphans(takes: bool) -> None:
    """Have what processes of the build leave behind become children of this one."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(takes), 0, 0, 0)


def _end_children() -> None:
    """End what the build has started, and what that has started."""
    while found := _child_ids():
        for pid in found:
            with contextlib.suppress(OSError):  # it is gone
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _child_ids() -> list[int]:
    found = []
    for thread in _threads():
        with contextlib.suppress(OSError):  # it has just ended
            found += Path(f"/proc/self/task/{thread}/children").read_text().split()
    return list(map(int, found))


def _children() -> list[str]:
    names = []
    for pid in _child_ids():
        with contextlib.suppress(OSError):
            name = Path("/proc", str(pid), "comm").read_text().strip()
            names.append(f"{name} ({pid})")
    return names


def _descriptors() -> Mapping[int, str]:
    """Return what each descriptor of this process leads to."""
    found = {}
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # that of the listing is closed by now
            found[int(entry.name)] = str(entry.readlink())
    return found


def _is_mapped(fd: int) -> bool:
    """Return whether a descriptor only holds a file that is mapped into memory for reading, as that
    of ``numpy.memmap`` does: nobody moves its place. numpy has moved it to the end, for the
    size."""
    try:
        status = os.fstat(fd)
        facts = Path(f"/proc/self/fdinfo/{fd}").read_text()
    except OSError:  # it is closed
        return True
    flags, place = (
        re.search(rf"^{name}:\s*(\w+)", facts, re.MULTILINE) for name in ("flags", "pos")
    )
    assert flags is not None and place is not None
    is_read_only = int(flags[1], 8) & os.O_ACCMODE == os.O_RDONLY
    is_unread = int(place[1]) in (0, status.st_size)
    if not (stat.S_ISREG(status.st_mode) and is_read_only and is_unread):
        return False
    pattern = re.compile(rf" {status.st_ino} +/")
    return pattern.search(Path("/proc/self/maps").read_text()) is not None


class OutputFile:
    """Where this process prints while it builds. Its forks print where it did before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        put_tees()
        sys.stdout.flush()
        self._before = (os.dup(1), os.dup(2))
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(opened, number)
        os.close(opened)
        root = logging.getLogger()
        self._level, self._handler = root.level, logging.StreamHandler(sys.stderr)
        root.addHandler(self._handler)
        root.setLevel(logging.INFO)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return what this process has opened for it."""
        return self._before

    def end_in_fork(self) -> Callable[[], list[str]]:
        """Print where the process did before. Return what gives the lines that were printed, to the
        first rank that asks."""
        root = logging.getLogger()
        root.removeHandler(self._handler)
        if root.level == logging.INFO:  # the task has chosen no other
            root.setLevel(self._level)
        for number, fd in enumerate(self._before, start=1):
            os.dup2(fd, number)
            os.close(fd)
        return partial(_taken, self.path)


def _taken(path: Path) -> list[str]:
    taken = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.rename(taken)
        lines = taken.read_text(errors="replace").splitlines()
        taken.unlink()
    except OSError:  # another rank has it
        return []
    return lines
