"""The program with which a raylet of the embedded cluster starts a worker.

It lets the fork server make the worker, and stands for it in the process tree.

    python worker_start.py [--serialized-runtime-env-context=JSON] [--language=PYTHON] \\
        WORKER_PATH ARGUMENTS

The raylet passes the arguments of Ray's ``setup_worker.py``. That script starts the worker if the
fork server cannot: in a container, with another Python, or without a server. This file is run by
path and imports only the standard library, since it delays every worker. It lives as long as its
worker, so that a node's processes are those below its raylet.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
from typing import Any, NoReturn

FORK_SERVER_VARIABLE = "EVERSTEP_FORK_SERVER"
"""Path of the fork server's socket, in the raylet's environment."""
CONTEXT_FLAG = "--serialized-runtime-env-context="
LANGUAGE_FLAG = "--language="
ANSWER_TIMEOUT_S = 45.0
"""Longest wait for the fork server, which may still import. Ray gives a worker 60 s."""
_NEEDS_EXEC = ("command_prefix", "override_worker_entrypoint", "java_jars")


def plan(arguments: list[str], environ: dict[str, str]) -> dict[str, Any] | None:
    """Return the request for the worker of these arguments, or None if it cannot be forked."""
    context = next(
        (text.removeprefix(CONTEXT_FLAG) for text in arguments if text.startswith(CONTEXT_FLAG)), ""
    )
    language = next(
        (text.removeprefix(LANGUAGE_FLAG) for text in arguments if text.startswith(LANGUAGE_FLAG)),
        "PYTHON",
    )
    runtime_env = json.loads(context or "{}")
    if language != "PYTHON" or any(runtime_env.get(name) for name in _NEEDS_EXEC):
        return None
    if runtime_env.get("py_executable") not in (None, "", sys.executable):
        return None
    variables: dict[str, str] = runtime_env.get("env_vars") or {}
    if any("$" in value for value in variables.values()):
        return None
    return {
        "argv": [text for text in arguments if not text.startswith((CONTEXT_FLAG, LANGUAGE_FLAG))],
        "environ": {**environ, **variables},
        "directory": os.getcwd(),  # noqa: PTH109 - it is sent as text, and pathlib costs start-up time
        "process_group": os.getpgrp(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduling_policy": os.sched_getscheduler(0),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }


def request_fork(request: dict[str, Any], address: str) -> tuple[int, socket.socket] | None:
    """Let the server fork the worker. Return its pidfd and the connection, or None without an
    answer.

    The server kills the worker when the connection ends.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.settimeout(ANSWER_TIMEOUT_S)
    try:
        server.connect(address)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        _, fds, _, _ = socket.recv_fds(server, 1, 1)
    except OSError:
        fds = []
    if fds:
        return fds[0], server
    server.close()
    return None


def last_as_long_as(worker: int, raylet: int) -> None:
    """Wait until the worker ends, and kill it if its raylet ends first. Both are pidfds."""
    ended, _, _ = select.select([worker, raylet], [], [])
    if worker not in ended:
        signal.pidfd_send_signal(worker, signal.SIGKILL)
        select.select([worker], [], [])


def main() -> NoReturn:
    """Start the worker and live as long as it does."""
    raylet = os.pidfd_open(os.getppid())
    address = os.environ.get(FORK_SERVER_VARIABLE)
    request = plan(sys.argv[1:], dict(os.environ)) if address else None
    answer = request_fork(request, address) if request and address else None
    if answer is None:
        os.execv(
            sys.executable,
            [sys.executable, "-m", "ray._private.workers.setup_worker", *sys.argv[1:]],
        )
    worker, _connection = answer
    last_as_long_as(worker, raylet)
    sys.exit(0)


if __name__ == "__main__":
    main()
