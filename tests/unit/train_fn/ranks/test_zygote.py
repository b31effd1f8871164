"""What is forked for a host ends with it, and the host hears how a fork ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.service_process import wait_for
from train_fn.ranks import fork, zygote
from train_fn.ranks.fork import Forker, ZygoteGone

LONELY_S = 2.0


def enter(connection: Connection) -> None:
    """Call functions until the host has no more, or the process ends."""
    while True:
        function, *arguments = connection.recv()
        connection.send(function(*arguments))


class Level:
    """A zygote that has imported nothing heavy, in a process of its own."""

    def __init__(self, path: Path, lonely_s: float = 60.0) -> None:
        self.path, self._hosts = path, list[Forker]()
        program = "import sys; from tests.unit.train_fn.ranks import test_zygote as t; t.main()"
        self.process = subprocess.Popen([sys.executable, "-c", program, str(path), str(lonely_s)])

    def host(self) -> Forker:
        """Connect as a host does."""
        wait_for(self.path.exists, 60, "the zygote's socket")
        self._hosts.append(Forker(self.path))
        return self._hosts[-1]

    def end(self) -> None:
        for each in self._hosts:
            each.close()
        self.process.kill()
        self.process.wait()


def main() -> None:
    path = Path(sys.argv[1])
    fork = zygote.Zygote(zygote.listen_at(path), float(sys.argv[2])).serve()
    if fork is not None:
        zygote.end_after(enter, fork)
    path.unlink()


@pytest.fixture
def level(tmp_path: Path) -> Iterator[Level]:
    made = Level(tmp_path / "sockets" / "level")
    yield made
    made.end()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def call(connection: Connection, function: Callable[..., Any], *arguments: Any) -> Any:
    connection.send((function, *arguments))
    return connection.recv()


def test_each_fork_is_another_process_and_how_it_ends_is_told(level: Level) -> None:
    host = level.host()
    forks = [host.fork() for _ in range(3)]
    assert [call(line, os.getpid) for _, line, _ in forks] == [pid for pid, _, _ in forks]
    assert {call(line, os.getppid) for _, line, _ in forks} == {level.process.pid}
    (killed, _, of_killed), (_, exits, of_exits), (_, raises, of_raises) = forks
    os.kill(killed, signal.SIGKILL)
    exits.send((os._exit, 7))
    raises.send((int, "no number"))
    assert os.WTERMSIG(of_killed.result(20)) == signal.SIGKILL
    assert [os.WEXITSTATUS(each.result(20)) for each in (of_exits, of_raises)] == [7, 1]


@pytest.mark.parametrize("number", [None, signal.SIGSTOP], ids=["runs", "is stopped"])
def test_forks_end_with_their_host_and_no_other_one_does(
    number: signal.Signals | None, level: Level
) -> None:
    host, other = level.host(), level.host()
    (ends, _, _), (stays, line, _), (released, kept, _) = host.fork(), other.fork(), host.fork()
    host.release(released)
    if number is not None:
        os.kill(ends, number)
    host.close()
    wait_for(lambda: not is_alive(ends), 20, "the end of its fork")
    assert call(line, os.getpid) == stays and call(kept, os.getpid) == released
    other.close()
    wait_for(lambda: not is_alive(stays), 20, "the end of the other fork")
    os.kill(released, signal.SIGKILL)


def sleeps() -> int:
    os.setpgid(0, 0)  # as a rank does
    return subprocess.Popen(["sleep", "300"]).pid


def test_the_programs_of_a_fork_end_with_it(level: Level) -> None:
    (killed, line, end), (stays, other, _) = (level.host().fork() for _ in range(2))
    program, other_s = call(line, sleeps), call(other, sleeps)
    os.kill(killed, signal.SIGKILL)
    assert os.WTERMSIG(end.result(20)) == signal.SIGKILL
    wait_for(lambda: not is_alive(program), 20, "the end of its program")
    assert is_alive(other_s) and call(other, os.getpid) == stays


def test_a_fork_has_none_of_its_zygotes_connections(level: Level) -> None:
    """It would hold them open when their ends are to be told."""
    host, _ = level.host(), level.host()
    lines = [host.fork()[1] for _ in range(2)]
    for line in lines:
        found = call(line, descriptors)
        assert [each for each in found if each.startswith(("socket:", "anon_inode:"))] == found[:1]
    assert call(lines[0], signal.getsignal, signal.SIGCHLD) == signal.SIG_DFL


def descriptors() -> list[str]:
    """Return what this process has opened beside standard streams, sockets first."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing
            names.append(str(entry.readlink()) if int(entry.name) > 2 else "")
    return sorted(filter(None, names), key=lambda name: not name.startswith("socket:"))


def test_a_zygote_that_is_killed_leaves_its_forks_and_says_so(level: Level) -> None:
    host = level.host()
    pid, line, end = host.fork()
    assert host.pid == level.process.pid
    host.end()
    level.process.wait()
    with pytest.raises(ZygoteGone, match=f"process {host.pid}, from which ranks are forked"):
        host.fork()
    assert call(line, os.getpid) == pid
    assert isinstance(end.exception(20), OSError), "nobody will know how it ends"
    os.kill(pid, signal.SIGKILL)


def test_one_that_is_stopped_is_not_waited_for_long(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork, "ANSWER_S", 0.2)
    host = level.host()
    os.kill(level.process.pid, signal.SIGSTOP)
    with pytest.raises(ZygoteGone):
        host.fork()


def test_a_zygote_ends_once_nobody_has_been_there_for_a_while(tmp_path: Path) -> None:
    level = Level(tmp_path / "level", LONELY_S)
    host = level.host()
    pid, _, _ = host.fork()
    time.sleep(2 * LONELY_S)
    assert level.process.poll() is None, "somebody is connected"
    host.close()
    level.process.wait(20)
    assert not is_alive(pid) and not level.path.exists()


def test_the_socket_of_a_dead_zygote_is_replaced_also_below_a_long_path(tmp_path: Path) -> None:
    path = tmp_path.joinpath(*["a-long-name" * 4] * 4) / "level"
    zygote.listen_at(path).close()
    with pytest.raises(ConnectionRefusedError):
        Forker(path)
    replaced = zygote.listen_at(path)
    Forker(path).close()
    replaced.close()
