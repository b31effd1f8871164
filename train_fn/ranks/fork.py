"""The host's side of its zygotes: find or start level 0 of the node, let a task be built once on
the node, and fork ranks. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from train_fn.errors import RankDied
from train_fn.node.node_dir import node_lock, own_temporary_dir
from train_fn.ranks.line import BuildOrder, BuildResult, LineEnded, RankFacts, Wire
from train_fn.ranks.zygote import MOST_BYTES, address_of, streams_of_this
from train_fn.recovery.launch import RankJob

ZYGOTE_VARIABLE = "EVERSTEP_FORK_SERVER"
"""Path of the socket of a level 0 that the node's cluster has started."""
START_S = 120.0
"""Longest time in seconds for a zygote to import what ranks need."""
ANSWER_S = 15.0
"""Longest time in seconds for a zygote to fork. One that needs longer is left."""
STATUS_S = 2.0
"""Longest wait in seconds to hear how a rank has ended."""
_LOOK_S, _STOPPED_S = 0.02, 0.5
_LEFT_S = 7 * 24 * 3600.0

logger = logging.getLogger(__name__)


class ZygoteGone(Exception):
    """A zygote has ended, or does not answer."""


class Forker:
    """A connection to a zygote of this node. Raises OSError if nobody listens at ``path``."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with address_of(path) as address:
                self._socket.connect(address)
        except OSError:
            self._socket.close()
            raise
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid = struct.unpack("3i", credentials)[0]
        self._pidfd: int | None = None
        with contextlib.suppress(OSError):  # it has ended
            self._pidfd = os.pidfd_open(self.pid)
        self._asking, self._lock = threading.Lock(), threading.Lock()
        self._forked: Future[int] | None = None
        self._answer_s = START_S
        """Longest wait for an answer: the first one comes once it has imported."""
        self._ends: dict[int, Future[int]] = {}
        """The wait status of each fork, by process id."""
        self.is_gone = False
        threading.Thread(target=self._read, name="zygote", daemon=True).start()

    def fork(self) -> tuple[int, Connection, Future[int]]:
        """Let it fork. Return the process id, the connection to the fork, and its wait status to
        come. Raises ZygoteGone."""
        ours, theirs = socket.socketpair()
        with self._asking:
            answer = self._forked = Future()
            try:
                if self.is_gone:
                    raise OSError("it has ended")
                socket.send_fds(self._socket, [pickle.dumps(("fork",))], [theirs.fileno()])
                pid = self._answer(answer)
                self._answer_s = ANSWER_S
            except (OSError, TimeoutError) as exc:
                ours.close()
                raise ZygoteGone(f"process {self.pid}, from which ranks are forked: {exc}") from exc
            finally:
                theirs.close()
        return pid, Connection(ours.detach()), self._end_of(pid)

    def _answer(self, answer: Future[int]) -> int:
        """Wait for the id of a fork. Raises OSError, at once if the zygote is stopped, and
        TimeoutError."""
        gives_up_at = time.monotonic() + self._answer_s
        while True:
            with contextlib.suppress(TimeoutError):
                return answer.result(_STOPPED_S)
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] in "Tt":
                raise OSError("it is stopped")
            if time.monotonic() > gives_up_at:
                raise TimeoutError("it does not answer")

    def release(self, pid: int) -> None:
        """Let a fork live on when this connection closes."""
        with contextlib.suppress(OSError):
            self._socket.send(pickle.dumps(("release", pid)))

    def close(self) -> None:
        """End the connection, and all that was forked for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Kill a zygote that does not answer. Its ranks go on."""
        if self._pidfd is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = None

    def _end_of(self, pid: int) -> Future[int]:
        with self._lock:
            return self._ends.setdefault(pid, Future[int]())

    def _read(self) -> None:
        while True:
            try:
                message = self._socket.recv(MOST_BYTES)
            except OSError:
                message = b""
            if not message:
                break
            what, pid, *rest = pickle.loads(message)
            if what == "ended":
                self._end_of(pid).set_result(rest[0])
            elif self._forked is not None:
                self._forked.set_result(pid)
        self.is_gone = True
        self._socket.close()
        with self._lock:
            ends, self._ends = self._ends, {}
        for end in ends.values():
            if not end.done():
                end.set_exception(OSError("the process that would know has ended"))
        if self._forked is not None and not self._forked.done():
            self._forked.set_exception(OSError("it has ended"))


class RankProcess:
    """A forked rank, as its host sees it.

    Args:
        serve: carries out what the rank calls, as ``Wire`` says.
    """

    def __init__(
        self,
        zygote: Forker,
        facts: RankFacts,
        serve: Callable[[str, tuple[Any, ...]], Any],
    ) -> None:
        self.pid, connection, self._status = zygote.fork()
        try:
            self._pidfd = os.pidfd_open(self.pid)  # a drill knows the rank by it
        except ProcessLookupError:
            self._pidfd = -1
        self._connection = connection
        connection.send(("rank", facts))
        self._line = Wire(connection, serve)

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a function in the rank. Raises RankDied if it has ended, TimeoutError, and what the
        function raises."""
        try:
            return self._line.call(name, *arguments, timeout_s=timeout_s)
        except LineEnded:
            raise RankDied(self.death()) from None

    def death(self) -> str:
        """Return how the rank has ended, in words."""
        try:
            status = self._status.result(STATUS_S)
        except (OSError, TimeoutError):
            return f"the rank's process {self.pid} is gone"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            with contextlib.suppress(ValueError):
                return f"the rank's process {self.pid} was killed by {signal.Signals(number).name}"
            return f"the rank's process {self.pid} was killed by signal {number}"
        return f"the rank's process {self.pid} has exited with code {os.WEXITSTATUS(status)}"

    def kill(self) -> None:
        """End the process at once, also a stopped one."""
        if self._pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """End the process, and forget it."""
        self.kill()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


@dataclass
class Zygotes:
    """The zygotes of a run on this node, as one of its hosts uses them."""

    node_id: str
    _level_0: Forker | None = None
    _level_1: Forker | None = None
    why_not: str | None = None
    """Why ranks build for themselves; None if they need not, or nothing was built yet."""
    failed: str | None = None
    """What the build has raised; None if it was well."""
    _has_own: bool = False
    """Whether level 0 is not the cluster's, which did not answer."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fork(self, facts: RankFacts, serve: Callable[[str, tuple[Any, ...]], Any]) -> RankProcess:
        """Fork a rank: with what was built, if that may be."""
        with self._lock:
            for _ in range(2):
                zygote = self._level_1 or self._imported()
                try:
                    return RankProcess(zygote, facts, serve)
                except ZygoteGone as exc:
                    logger.warning("%s; another one takes its place", exc)
                    self._leave(zygote)
        raise ZygoteGone("no process forks a rank on this node")

    @property
    def has_built(self) -> bool:
        """Return whether what ranks train is built, or will be by each of them."""
        if self.failed is not None:  # it is tried again with each attempt
            return False
        return self.why_not is not None or (self._level_1 is not None and not self._level_1.is_gone)

    def build(self, order: Callable[[Path], BuildOrder], job: RankJob) -> float:
        """Have the task built, unless another host of the node has. Return the seconds that it took
        here; 0 if it was there. Raises ZygoteGone."""
        try:
            return self._build(order, job)
        except OSError as exc:  # of the node's temporary directory: checks of the node name it
            self.failed = self.why_not = f"the node has no room for what is built once: {exc}"
            return 0.0

    def _build(self, order: Callable[[Path], BuildOrder], job: RankJob) -> float:
        path = _directory() / f"{_key(job, self.node_id)}.sock"
        with self._lock, node_lock(path.with_suffix(".lock")):
            refused = path.with_suffix(".no")
            if refused.exists():
                self.why_not = refused.read_text()
                return 0.0
            with contextlib.suppress(OSError):
                self._level_1 = Forker(path)
                return 0.0
            zygote, pid, connection = self._fork_of_level_0()
            connection.send(("build", order(path)))
            built: BuildResult | None = None
            with contextlib.suppress(EOFError, OSError):
                built = connection.recv()
            connection.close()
            if built is None:
                built = BuildResult(None, "its process has ended", 0.0)
            self.why_not, self.failed = built.why_not, built.failed
            if built.failed is not None:  # each rank tries again, and tells what it meets
                self.why_not = f"the build failed in a process of its own ({built.failed})"
                return built.seconds
            if built.why_not is not None:
                refused.write_text(built.why_not)
                return built.seconds
            self._level_1 = Forker(path)
            zygote.release(pid)
            return built.seconds

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in a fork of level 0, which ends with it. Raises RankDied."""
        with self._lock:
            _, _, connection = self._fork_of_level_0()
        try:
            environ = dict(os.environ)  # its directories are the node's
            connection.send(("call", environ, streams_of_this(), function, *arguments))
            return connection.recv()
        except (EOFError, OSError):
            raise RankDied(f"a process that was to run {function.__name__} has ended") from None
        finally:
            connection.close()

    def _fork_of_level_0(self) -> tuple[Forker, int, Connection]:
        """Fork level 0. One that ends just now is replaced."""
        zygote = self._imported()
        try:
            pid, connection, _ = zygote.fork()
        except ZygoteGone:
            self._leave(zygote)
            zygote = self._imported()
            pid, connection, _ = zygote.fork()
        return zygote, pid, connection

    def _imported(self) -> Forker:
        """Return level 0 of this node."""
        if self._level_0 is None or self._level_0.is_gone:
            self._level_0 = level_0(self.node_id, own=self._has_own)
        return self._level_0

    def _leave(self, zygote: Forker) -> None:
        if zygote is not self._level_0:
            zygote.end()
            self._level_1 = None
            return
        # That of the cluster serves others: it is not ended, and another one is started.
        if self._has_own or ZYGOTE_VARIABLE not in os.environ:
            zygote.end()
        self._level_0, self._has_own = None, True


def level_0(node_id: str, *, own: bool = False) -> Forker:
    """Return a connection to the node's level 0, which is started if there is none.

    Args:
        own: whether that of the cluster is passed over, since it did not answer.
    """
    if (given := os.environ.get(ZYGOTE_VARIABLE)) and not own:
        with contextlib.suppress(OSError):
            return Forker(Path(given))
    name = hashlib.sha256(f"{node_id} {sys.executable}".encode()).hexdigest()[:16]
    path = _directory() / f"{name}.sock"
    with node_lock(path.with_suffix(".lock")):
        with contextlib.suppress(OSError):
            return Forker(path)
        path.unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "train_fn.ranks.zygote", str(path)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        gives_up_at = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < gives_up_at:
            with contextlib.suppress(OSError):
                return Forker(path)
            time.sleep(_LOOK_S)
        process.kill()
    raise ZygoteGone(
        "the process from which ranks are forked did not start on this node; "
        "`python -m train_fn.ranks.zygote /tmp/try.sock` shows why"
    )


def _directory() -> Path:
    """Return where the zygotes of this user listen, and remove what runs have left there long
    ago."""
    found = own_temporary_dir() / "zygotes"
    found.mkdir(mode=0o700, exist_ok=True)
    for path in found.iterdir():
        with contextlib.suppress(OSError):
            if path.suffix != ".sock" and time.time() - path.stat().st_mtime > _LEFT_S:
                path.unlink()
    return found


def _key(job: RankJob, node_id: str) -> str:
    """Return what names the build of a run's submission on a node."""
    spec = job.spec.model_dump_json()
    text = json.dumps([job.run_dir.uri, job.submission, node_id, spec, sys.executable])
    return hashlib.sha256(text.encode()).hexdigest()[:24]
