"""The fork server: level 0 of the embedded cluster's nodes (``train_fn/ranks/zygote.py``), which
also forks the workers that raylets ask for, and the drivers of Ray jobs.

``python -m train_fn.ray_train.fork_server SOCKET MODULE…``. A normal worker spends three seconds of
CPU on the imports of Python, Ray and torch. A forked one shares them and starts in a tenth of a
second. Raylets and jobs reach this process through :mod:`service.embedded.worker_start`, with one
connection for each worker; hosts of ranks through :mod:`train_fn.ranks.fork`.

The process must be safe to fork. It has no threads that matter and never connects to Ray. It draws
no number from Ray's random generator: all workers would inherit its state, and so make equal ids.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import resource
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from train_fn.ranks import zygote

IDENTITY = {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": "1"}
"""Variables that Ray reads at its import, when the worker is not known yet: it has no job, like a
worker that is started ahead, and its parent never dies. The raylet's death ends the worker through
worker_start."""
_STREAMS, _MOST_FDS = 3, 4

log = logging.getLogger("fork-server")


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


def take_streams(connection: Connection) -> None:
    """Take the standard streams that come over the connection; a driver also ends with the process
    of the pidfd behind them."""
    with socket.socket(fileno=os.dup(connection.fileno())) as arriving:
        _, fds, _, _ = socket.recv_fds(arriving, 1, _MOST_FDS)
    connection.close()
    for number, fd in enumerate(fds[:_STREAMS]):
        os.dup2(fd, number)
        os.close(fd)
    if len(fds) > _STREAMS:
        os.setsid()
        end_with(fds[_STREAMS])


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
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if module is None:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        zygote.show_as(["python", "-m", module, *sys.argv[1:]])
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM."""
    path, *modules = sys.argv[1:] if argv is None else argv
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    os.environ.update(IDENTITY)
    listening = zygote.listen_at(Path(path))  # who connects waits for the imports
    import_modules(modules)
    zygote.import_all()
    connection = zygote.Zygote(listening, math.inf).serve()
    assert connection is not None
    what, *rest = connection.recv()
    if what != "worker":
        zygote.end_after(lambda rank: zygote.enter(rank, what, *rest), connection)
    take_streams(connection)
    become_worker(rest[0])


if __name__ == "__main__":
    main()
