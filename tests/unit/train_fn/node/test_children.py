"""A rank is gone for its peers and for Ray as soon as its process is, whatever it has started."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil
import pytest

from train_fn.node import children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's descriptors and signals")

PATIENCE_S = 30.0
_SLEEP = ("sleep", "300")
_PR_SET_CHILD_SUBREAPER = 36


# -- ways to start a process, which keep all that is inheritable


def by_fork() -> None:
    if os.fork() == 0:
        time.sleep(300)


def by_a_thread_that_ends() -> None:
    thread = threading.Thread(target=by_fork)
    thread.start()
    thread.join()


def by_multiprocessing() -> None:
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,)).start()


def by_a_pool() -> None:
    globals()["pool"] = multiprocessing.get_context("fork").Pool(2)


def as_a_daemon() -> None:
    between = os.fork()
    if between == 0:
        os.setsid()
        by_fork()
        os._exit(0)
    os.waitpid(between, 0)


def by_fork_and_exec() -> None:
    if os.fork() == 0:
        os.setsid()
        os.execvp(_SLEEP[0], _SLEEP)


def by_popen() -> None:
    globals()["program"] = subprocess.Popen(_SLEEP, close_fds=False, start_new_session=True)


def by_posix_spawn() -> None:
    os.posix_spawnp(_SLEEP[0], _SLEEP, os.environ)


def by_a_shell() -> None:
    os.system("sleep 300 &")


ENDED_BY_THE_KERNEL = (
    by_fork,
    by_a_thread_that_ends,
    by_multiprocessing,
    by_a_pool,
    as_a_daemon,
    by_fork_and_exec,
)
SPAWNED = (by_popen, by_posix_spawn, by_a_shell)


# -- a rank


class Rank(NamedTuple):
    """A process with a connection to this one, which stands for its peer and for Ray."""

    process: Any
    connection: socket.socket
    started: list[psutil.Process]

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def is_noticed(self) -> bool:
        self.connection.settimeout(PATIENCE_S)
        try:
            return self.connection.recv(1) == b""
        except TimeoutError:
            return False

    def left(self) -> list[psutil.Process]:
        return [one for one in self.started if one.is_running() and one.status() != "zombie"]

    def wait_for_none_left(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while left := self.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.01)


Begin = Callable[[Callable[[], None]], Rank]


@pytest.fixture
def begin() -> Iterator[Begin]:
    ranks: list[Rank] = []
    context = multiprocessing.get_context("forkserver")

    def start(way: Callable[[], None]) -> Rank:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(PATIENCE_S)
            process = context.Process(target=_be_a_rank, args=(server.getsockname(), way))
            process.start()
            connection, _ = server.accept()
        connection.settimeout(PATIENCE_S)
        assert connection.recv(1) == b"s", "the process is started"
        assert process.pid is not None
        started = psutil.Process(process.pid).children(recursive=True)
        assert started, way
        ranks.append(Rank(process, connection, started))
        return ranks[-1]

    yield start
    for rank in ranks:
        for process in [rank.process, *rank.started]:
            process.kill()
        rank.process.join()
        rank.connection.close()


def _be_a_rank(address: tuple[str, int], way: Callable[[], None]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # it finds daemons, too
    children.begin()
    connection = socket.create_connection(address)
    os.set_inheritable(connection.fileno(), True)  # as gloo's are
    children.connected()
    way()
    connection.sendall(b"s")
    time.sleep(300)


@pytest.mark.parametrize("way", ENDED_BY_THE_KERNEL)
def test_what_a_rank_forks_ends_with_it(way: Callable[[], None], begin: Begin) -> None:
    rank = begin(way)
    assert len(rank.left()) == len(rank.started), "they run while the rank does"
    rank.kill()
    assert rank.is_noticed()
    rank.wait_for_none_left()


@pytest.mark.parametrize("way", SPAWNED)
def test_programs_hold_no_connection(way: Callable[[], None], begin: Begin) -> None:
    rank = begin(way)
    rank.kill()
    assert rank.is_noticed()


# -- what a forked process keeps


def _answer_in_a_child(address: tuple[str, int], results: Any) -> None:
    """Use sockets of the user's in a forked process, and end it in order."""
    children.begin()
    rank_s = socket.create_connection(address)
    children.connected()
    here, there = socket.socketpair()
    users = socket.create_connection(address)
    pid = os.fork()
    if pid == 0:
        there.sendall(b"pair")
        users.sendall(b"u")
        try:
            rank_s.sendall(b"x")
        except OSError:
            there.sendall(b", no rank's")
        rank_s.close()
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    rank_s.sendall(b"r")
    results.send((status, here.recv(100)))


def test_a_forked_process_keeps_the_user_s_sockets_and_does_not_break_the_rank_s() -> None:
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe(duplex=False)  # a socket would be taken for the rank's
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = context.Process(target=_answer_in_a_child, args=(server.getsockname(), theirs))
        process.start()
        rank_s, users = (server.accept()[0] for _ in range(2))
    assert mine.poll(PATIENCE_S)
    assert mine.recv() == (0, b"pair, no rank's")
    with rank_s, users:
        assert (rank_s.recv(10), users.recv(10)) == (b"r", b"u")
    process.join()
