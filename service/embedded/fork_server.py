"""The fork server: a process with the imports of ranks, controllers and drivers, which it forks
into the workers that raylets ask for, and into the drivers of Ray jobs.

``python -m service.embedded.fork_server SOCKET MODULE…``. A normal worker spends three seconds of
CPU on the imports of Python, Ray and torch. A forked one shares them and starts in a tenth of a
second. Raylets and jobs reach this process through :mod:`service.embedded.worker_start`, with one
connection for each worker. The server sends the worker's wait status over it in the end. When a
connection ends before, the server kills the worker.

The process must be safe to fork. It has no threads that matter and never connects to Ray. It draws
no number from Ray's random generator: all workers would inherit its state, and so make equal ids.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import resource
import runpy
import select
import selectors
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LONGEST_REQUEST = 1 << 20
BACKLOG = 128
IDENTITY = {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": "1"}
"""Variables that Ray reads at its import, when the worker is not known yet: it has no job, like a
worker that is started ahead, and its parent never dies. The raylet's death ends the worker through
worker_start."""

log = logging.getLogger("fork-server")


class ForkServer:
    """Serves requests. In a forked worker, ``serve`` returns the worker's request.

    Args:
        listener: A listening socket of sequenced packets.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._workers: dict[int, tuple[int, socket.socket]] = {}
        """Pid and connection of each live worker, by pidfd."""

    def serve(self) -> dict[str, Any]:
        """Fork a worker for each request. Return only in a worker, with its request."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._selector.register(connection, selectors.EVENT_READ, self._on_message)
                    continue
                # The end of its worker closed it just before.
                if isinstance(key.fileobj, socket.socket) and key.fileobj.fileno() == -1:
                    continue
                request: dict[str, Any] | None = key.data(key.fileobj)
                if request is not None:
                    return request

    def _on_message(self, connection: socket.socket) -> dict[str, Any] | None:
        """Handle a request, or the end of the process that stands for a worker."""
        fds: list[int] = []
        try:
            message, fds, _, _ = socket.recv_fds(connection, LONGEST_REQUEST, 4)
            if not message:
                self._drop(connection)
                return None
            request: dict[str, Any] = json.loads(message)
            return self._fork(request, connection, fds)
        except (OSError, ValueError):
            log.exception("a request could not be served")
            self._drop(connection)
            return None
        finally:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _fork(
        self, request: dict[str, Any], connection: socket.socket, fds: list[int]
    ) -> dict[str, Any] | None:
        pid = os.fork()
        if pid == 0:
            for number, fd in enumerate(fds[:3]):
                os.dup2(fd, number)
            self._forget_all()
            if "module" in request:
                os.setsid()
                end_with(os.dup(fds[3]))
            return request
        pidfd = os.pidfd_open(pid)
        self._workers[pidfd] = (pid, connection)
        self._selector.register(pidfd, selectors.EVENT_READ, self._on_exit)
        socket.send_fds(connection, [b"+"], [pidfd])
        return None

    def _on_exit(self, pidfd: int) -> None:
        pid, connection = self._workers.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(OSError):  # A raylet's stand-in has ended by then.
            connection.send(str(status).encode(), socket.MSG_DONTWAIT)
        self._close(connection)

    def _drop(self, connection: socket.socket) -> None:
        for pid, other in self._workers.values():
            if other is connection:
                os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError):  # Only a driver leads a group.
                    os.killpg(pid, signal.SIGKILL)
        self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()

    def _forget_all(self) -> None:
        """Close in a new worker what belongs to the others."""
        for pidfd, (_, connection) in self._workers.items():
            os.close(pidfd)
            connection.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()


def import_modules(names: Sequence[str]) -> None:
    """Import the modules that workers need. Log and skip a module that fails, as Ray does."""
    import ray.actor

    # Ray draws an id when an actor class is declared. Here it must not come from Ray's generator.
    drawn, ray.actor.ActorClassID = ray.actor.ActorClassID, _SystemRandomId
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            log.exception("module %s could not be imported ahead", name)
    ray.actor.ActorClassID = drawn


class _SystemRandomId:
    @staticmethod
    def from_random() -> object:
        from ray import ActorClassID

        return ActorClassID(os.urandom(ActorClassID.size()))


def end_with(stand_in: int) -> None:
    """Kill this process and its group once the process of this pidfd ends.

    So a driver ends with its job, even if the server, which would kill it, has ended before.
    """

    def wait() -> None:
        select.select([stand_in], [], [])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="stand-in", daemon=True).start()


def become_worker(request: dict[str, Any]) -> None:
    """Turn this process into the worker: set up what ``exec`` would, then run Ray's worker script,
    or the ``module`` of a driver."""
    module: str | None = request.get("module")
    if module is None:
        # As in each process that Ray starts.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with contextlib.suppress(OSError):
            os.setpgid(0, request["process_group"])
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
        os.sched_setscheduler(0, request["scheduling_policy"], os.sched_param(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(request["open_files"]))
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environ"])
    # The server's handler would write to stderr without the filter that hides secrets in a rank's
    # output.
    logging.basicConfig(level=logging.WARNING, handlers=[], force=True)
    tempfile.tempdir = None  # It was computed in another environment.
    sys.argv = request["argv"]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if module is None:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        sys.path[0] = request["directory"]
        show_as(["python", "-m", module, *sys.argv[1:]])
        runpy.run_module(module, run_name="__main__", alter_sys=True)


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


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM."""
    path, *modules = sys.argv[1:] if argv is None else argv
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    os.environ.update(IDENTITY)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(BACKLOG)
    import_modules(modules)
    gc.collect()
    gc.freeze()
    request = ForkServer(listener).serve()
    become_worker(request)


if __name__ == "__main__":
    main()
