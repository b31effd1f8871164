"""A process that forks: ranks begin as copies of it.

    host      the Ray actor of a rank. It imports no torch and runs no code of the user's
    level 0   one a node: has imported what a first step needs, and nothing of the user's
    level 1   one a run and node: forked from level 0, has built the task, never trains
    rank      a fork of level 1 (or of level 0, if what was built may not be shared)

So an attempt begins as the build has ended: what an earlier attempt has left behind cannot be in
its process, and nobody waits for a second build. ``python -m train_fn.ranks.zygote SOCKET`` is
level 0; ``serve`` is what both levels do.

A zygote has one thread and opens no device. A connection asks for forks and is told of their ends;
what was forked for it is killed when it closes. So the ranks of a host end with it, even one that
is stopped. What a rank has started ends with the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import os
import pickle
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

BACKLOG = 128
LONELY_S = 5.0
"""Seconds after which a zygote ends to which nobody is connected."""
MOST_BYTES = 1 << 16


class Zygote:
    """Serves requests until nobody is connected any more.

    Args:
        listening: accepts connections of hosts: sequenced packets.
        lonely_s: seconds without a connection after which ``serve`` returns; infinity for never.
    """

    def __init__(self, listening: socket.socket, lonely_s: float) -> None:
        self._listening, self._lonely_s = listening, lonely_s
        self._forks: dict[int, socket.socket] = {}
        """The connection for which each living fork was made, by process id."""
        self._hosts: set[socket.socket] = set()
        self._waiting = selectors.DefaultSelector()
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        self._lonely_since = time.monotonic()

    def serve(self) -> Connection | None:
        """Fork for each request. Return None when lonely, and in a fork the connection to who has
        asked for it."""
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        before = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._waiting.register(self._listening, selectors.EVENT_READ)
        self._waiting.register(self._woken, selectors.EVENT_READ)
        gc.collect()
        gc.freeze()  # the collector writes into no page that forks share
        while self._hosts or time.monotonic() < self._lonely_since + self._lonely_s:
            limit_s = None if math.isinf(self._lonely_s) else self._lonely_s
            for key, _ in self._waiting.select(limit_s):
                if key.fileobj is self._listening:
                    host, _ = self._listening.accept()
                    self._hosts.add(host)
                    self._waiting.register(host, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    if (connection := self._take(key.fileobj, before)) is not None:
                        return connection
                else:
                    os.read(self._woken, 4096)
                    self._reap()
        return None

    def _take(self, host: socket.socket, before: Any) -> Connection | None:
        """Carry out what a host asks for, or end what it has asked for if it is gone. In a fork,
        return its connection."""
        try:
            message, fds, _, _ = socket.recv_fds(host, MOST_BYTES, 1)
        except OSError:
            message, fds = b"", []
        if not message:
            self._drop(host)
            return None
        what, *rest = pickle.loads(message)
        if what == "release":  # it serves others by now, and ends by itself
            self._forks.pop(rest[0], None)
            return None
        pid = os.fork()
        if pid == 0:
            self._leave(before)
            return Connection(fds[0])
        for fd in fds:
            os.close(fd)
        self._forks[pid] = host
        self._tell(host, ("forked", pid))
        return None

    def _leave(self, before: Any) -> None:
        """Let go of what is the zygote's, in a fork."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, before)
        self._waiting.close()
        for each in (*self._hosts, self._listening):
            each.close()
        os.close(self._woken)
        os.close(self._wakes)

    def _reap(self) -> None:
        """Tell hosts of the ends of their forks, and end the process group that one has led: the
        programs that a rank has started."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            with contextlib.suppress(OSError):  # it led none
                os.killpg(ended.si_pid, signal.SIGKILL)  # nobody else has its id yet
            pid, status = os.waitpid(ended.si_pid, 0)
            host = self._forks.pop(pid, None)
            if host is not None:
                self._tell(host, ("ended", pid, status))

    def _drop(self, host: socket.socket) -> None:
        self._waiting.unregister(host)
        self._hosts.discard(host)
        host.close()
        for pid, owner in list(self._forks.items()):
            if owner is host:
                del self._forks[pid]
                for kill in (os.kill, os.killpg):  # a driver leads a group
                    with contextlib.suppress(ProcessLookupError):
                        kill(pid, signal.SIGKILL)
        self._lonely_since = time.monotonic()

    @staticmethod
    def _tell(host: socket.socket, fact: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):  # it is gone; the next turn finds out
            host.send(pickle.dumps(fact), socket.MSG_DONTWAIT)


def end_after(enter: Callable[[Connection], None], connection: Connection) -> NoReturn:
    """Let a fork do what it is for, and end it: nothing that the zygote has registered may run
    twice."""
    code = 1
    try:
        enter(connection)
        code = 0
    except BaseException as exc:
        print(f"process {os.getpid()}: {exc!r}", file=sys.stderr, flush=True)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)


Streams = tuple[str, str]
"""Files to which a host prints: its standard output and error."""


def streams_of_this() -> Streams:
    """Return where this process prints."""
    out, err = (str(Path(f"/proc/self/fd/{number}").readlink()) for number in (1, 2))
    return out, err


def begin_anew(streams: Streams) -> None:
    """Print where the host does, and forget what was set for the zygote alone."""
    for number, path in enumerate(streams, start=1):
        with contextlib.suppress(OSError):
            if Path(path).is_file():
                opened = os.open(path, os.O_WRONLY | os.O_APPEND)
                os.dup2(opened, number)
                os.close(opened)
    # The zygote's handler would write without the filter that hides secrets.
    logging.basicConfig(level=logging.WARNING, handlers=[], force=True)
    tempfile.tempdir = None  # it was computed in another environment


def show_as(command: Sequence[str]) -> None:
    """Let ``ps`` show a command in place of the server's. Its end is cut off if it is longer.

    Source: proc(5), arg_start and arg_end of /proc/PID/stat. Ray's own function would overwrite
    the environment too, by which the keeper knows the processes of its cluster.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if end > start > 0:
        text = "\0".join(command).encode()[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


@contextlib.contextmanager
def address_of(path: Path) -> Iterator[str]:
    """Yield an address of a socket's file that is short enough for the system, however long its
    path is."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        address = f"/proc/self/fd/{directory}/{path.name}"
        yield address
    finally:
        os.close(directory)


def listen_at(path: Path) -> socket.socket:
    """Return a socket that accepts connections at ``path``, in place of a dead process's."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with address_of(draft) as address:
        listening.bind(address)
    listening.listen(BACKLOG)
    draft.replace(path)  # whoever finds it can connect
    return listening


# ---------------------------------------------------------------- level 0


def import_all() -> None:
    """Import what a rank imports up to the end of its first step. torch imports more in the first
    call of an optimizer. No backward pass: that starts a thread for each device."""

    import torch
    import torch.utils.flop_counter
    import torch.utils.serialization

    torch.set_num_threads(1)  # a fork would lack the threads of a pool, and wait for them
    import train_fn.ranks.rank
    import train_fn.tasks.builtin  # noqa: F401

    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.step()
    optimizer.zero_grad()


def enter(connection: Connection, what: str, *rest: Any) -> None:
    """Do what the host asks of a fork of level 0: be a rank, build a task, or call a function."""
    if what == "rank":
        from train_fn.ranks.main import be_rank

        be_rank(connection, *rest)
    elif what == "build":
        from train_fn.ranks.build_once import build_and_serve

        build_and_serve(connection, *rest)
    else:
        environ, streams, function, *arguments = rest
        begin_anew(streams)
        os.environ.clear()
        os.environ.update(environ)
        connection.send(function(*arguments))


def main() -> None:
    """Be level 0."""
    path = Path(sys.argv[1])
    import_all()
    connection = Zygote(listen_at(path), LONELY_S).serve()
    if connection is not None:
        end_after(lambda line: enter(line, *line.recv()), connection)
    path.unlink(missing_ok=True)


if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    main()
