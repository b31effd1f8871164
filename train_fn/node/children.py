"""Keep the processes that a rank starts from holding its connections, and from outliving it.

A forked process inherits every descriptor of the rank. While it lives, the connections of a dead
rank stay open: the collectives of its peers do not fail, and Ray takes the rank for alive. So a
forked process lets go of the rank's connections at once, a program that the rank starts gets none
of them, and the kernel kills what was forked once the rank is gone. Who forks a rank ends all of
its process group with it (``ranks/zygote.py``): that of the programs, too.

Connections are told apart by when they were made: those of Ray before any code of the user ran,
those of the process group while it was formed. Sockets of the user's code are left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple


class _Rank(NamedTuple):
    """What ties forked processes to this one."""

    reading: int
    """End of a pipe that becomes readable when the rank is gone, because nobody else has the other
    end."""
    writing: int
    pipe: int
    """Inode of the pipe."""


_rank: _Rank | None = None
_owned: set[int] = set()
"""Inodes of the rank's connections, and of the sockets on which it accepts them."""
_before: set[int] = set()
"""Inodes of the TCP sockets that were there when ``begin`` was last called."""


def begin() -> None:
    """Take this process for a rank that is about to get its connections. The first call comes
    before any code of the user runs, so all sockets are the rank's by then."""
    global _rank
    if sys.platform != "linux":
        return
    if _rank is None:
        _own({inode for inode, _ in _sockets()})
        reading, writing = os.pipe()
        _rank = _Rank(reading, writing, os.fstat(reading).st_ino)
        _own_those_of_groups()
    _before.clear()
    _before.update(inode for inode, _ in _sockets(tcp_only=True))


def connected() -> None:
    """Take the TCP sockets that were made since ``begin`` for the rank's."""
    if _rank is not None:
        _own({inode for inode, _ in _sockets(tcp_only=True)} - _before)


def _own_those_of_groups() -> None:
    """Take the sockets of groups that are made later, by whomever, for the rank's as well."""
    from torch.distributed import distributed_c10d

    make = getattr(distributed_c10d, "_new_process_group_helper", None)
    if make is not None:
        distributed_c10d._new_process_group_helper = owning(make)


def owning(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``make``, whose TCP sockets are taken for the rank's."""

    def owned(*arguments: Any, **named: Any) -> Any:
        before = {inode for inode, _ in _sockets(tcp_only=True)}
        try:
            return make(*arguments, **named)
        finally:
            _own({inode for inode, _ in _sockets(tcp_only=True)} - before)

    return owned


def _own(inodes: Collection[int]) -> None:
    """Own these sockets, and keep them from programs that the rank starts."""
    _owned.update(inodes)
    for inode, fd in _sockets():
        if inode in _owned:
            os.set_inheritable(fd, False)


def _sockets(*, tcp_only: bool = False) -> Iterator[tuple[int, int]]:
    """Yield inode and descriptor of every socket of this process but its standard streams."""
    standard = _standard_streams()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a path for each would be made in vain
        with contextlib.suppress(OSError):  # it is closed by now
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode) or status.st_ino in standard:
                continue
            if not tcp_only or _is_tcp(int(name)):
                yield status.st_ino, int(name)


def _standard_streams() -> set[int]:
    found = set()
    for fd in range(3):
        with contextlib.suppress(OSError):
            found.add(os.fstat(fd).st_ino)
    return found


@contextlib.contextmanager
def _as_socket(fd: int) -> Iterator[socket.socket]:
    one = socket.socket(fileno=fd)
    try:
        yield one
    finally:
        one.detach()


def _is_tcp(fd: int) -> bool:
    with _as_socket(fd) as one:
        return one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6)


def _listens(fd: int) -> bool:
    with _as_socket(fd) as one:
        return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and _is_tcp(fd)


def _port(fd: int) -> int:
    with _as_socket(fd) as one:
        return int(one.getsockname()[1])


# -- in a forked process


def _leave_rank() -> None:
    """Let go of the rank's connections, and end with the rank."""
    if _rank is None:
        return
    with contextlib.suppress(OSError):
        _end_with_rank(_rank)
    closed, other = socket.socketpair()
    other.close()
    listening = {_port(fd) for inode, fd in _sockets() if inode in _owned and _listens(fd)}
    for inode, fd in list(_sockets()):
        if inode in _owned or (listening and _is_tcp(fd) and _port(fd) in listening):
            # Not closed: a library that has the number would close what takes it next.
            os.dup2(closed.fileno(), fd, inheritable=False)
    closed.close()


def _end_with_rank(rank: _Rank) -> None:
    """Let the kernel kill this process as soon as the rank is gone. A parent-death signal would
    come as soon as the thread of the rank ends that has forked it."""
    if os.fstat(rank.reading).st_ino != rank.pipe:
        return  # the process that forked this one has closed all that it had
    # Opened anew, since what is set belongs to all processes that share an opened file.
    fd = os.open(f"/proc/self/fd/{rank.reading}", os.O_RDONLY | os.O_NONBLOCK)
    os.set_inheritable(fd, True)  # also of a program that takes the place of this one
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    if os.fstat(rank.writing).st_ino == rank.pipe:
        # If the rank is gone by now, this is the last writing end, whose end kills this process.
        # The number stays taken, since a process that this one forks does the same.
        os.dup2(rank.reading, rank.writing, inheritable=False)


os.register_at_fork(after_in_child=_leave_rank)
