"""The program with which a raylet of the embedded cluster starts a worker, and a job its driver.

It lets the fork server make the worker, and stands for it in the process tree.

    python worker_start.py [--serialized-runtime-env-context=JSON] [--language=PYTHON] \\
        WORKER_PATH ARGUMENTS
    python -S worker_start.py --module=NAME ARGUMENTS

The raylet passes the arguments of Ray's ``setup_worker.py``. That script starts the worker if the
fork server cannot: in a container, with another Python, or without a server. A driver is started as
``python -m NAME`` then. This file is run by path and imports only the standard library, since it
delays every worker. It lives as long as its worker, so that a node's processes are those below its
raylet, and a job's signals and exit code are its driver's.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

FORK_SERVER_VARIABLE = "EVERSTEP_FORK_SERVER"
"""Path of the fork server's socket, in the raylet's environment."""
MODULE_FLAG = "--module="
DRIVER = ("python", "-S", __file__, f"{MODULE_FLAG}train_fn.driver")
"""The command of a job on the embedded cluster. ``-S`` saves the time of looking for packages."""
CONTEXT_FLAG = "--serialized-runtime-env-context="
LANGUAGE_FLAG = "--language="
ANSWER_TIMEOUT_S = 45.0
"""Longest wait for the fork server, which may still import. Ray gives a worker 60 s."""
_MOST_BYTES = 1 << 12
_PASSED_ON = (signal.SIGINT, signal.SIGTERM)
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
    argv = [text for text in arguments if not text.startswith((CONTEXT_FLAG, LANGUAGE_FLAG))]
    return _request(argv, {**environ, **variables})


def _request(argv: list[str], environ: dict[str, str]) -> dict[str, Any]:
    return {
        "argv": argv,
        "environ": environ,
        "directory": os.getcwd(),  # noqa: PTH109 - it is sent as text, and pathlib costs start-up time
        "process_group": os.getpgrp(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduling_policy": os.sched_getscheduler(0),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }


def request_fork(
    request: dict[str, Any], address: str, fds: tuple[int, ...] = (0, 1, 2)
) -> tuple[int, socket.socket] | None:
    """Let the server fork the worker. Return its pidfd and the connection, or None without an
    answer.

    The server kills the worker when the connection ends.

    Args:
        request: What the worker is to become.
        address: The server's socket.
        fds: The worker's standard streams; for a driver also the pidfd of this process.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.settimeout(ANSWER_TIMEOUT_S)
    ours, theirs = socket.socketpair()
    try:
        server.connect(address)
        socket.send_fds(server, [pickle.dumps(("fork",))], [theirs.fileno()])
        _, pid = pickle.loads(server.recv(_MOST_BYTES))
        worker = os.pidfd_open(pid)
        # as multiprocessing.connection reads it
        message = pickle.dumps(("worker", request))
        ours.sendall(struct.pack("!i", len(message)) + message)
        socket.send_fds(ours, [b"+"], fds)
        return worker, server
    except (OSError, EOFError, ValueError, pickle.UnpicklingError):
        server.close()
        return None
    finally:
        ours.close()
        theirs.close()


def last_as_long_as(worker: int, raylet: int) -> None:
    """Wait until the worker ends, and kill it if its raylet ends first. Both are pidfds."""
    ended, _, _ = select.select([worker, raylet], [], [])
    if worker not in ended:
        signal.pidfd_send_signal(worker, signal.SIGKILL)
        select.select([worker], [], [])


def start_driver(module: str, arguments: list[str]) -> NoReturn:
    """Start a driver, pass on its signals, and end as it does."""
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    address = os.environ.get(FORK_SERVER_VARIABLE)
    answer = None
    if address:
        request = {**_request([module, *arguments], dict(os.environ)), "module": module}
        answer = request_fork(request, address, (0, 1, 2, os.pidfd_open(os.getpid())))
    if answer is None:
        os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])
    driver, server = answer
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _frame: _pass_on(driver, number))
    server.settimeout(None)
    status = _received(server)
    select.select([driver], [], [])
    if status is None:
        print(f"the fork server ended before {module} did; its exit code is unknown", flush=True)
        sys.exit(1)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        for number in _PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _pass_on(driver: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(driver, number)


def _received(server: socket.socket) -> int | None:
    """Return the driver's wait status, or None if the server ends first."""
    try:
        _, _, status = pickle.loads(server.recv(_MOST_BYTES))
        return int(status)
    except (OSError, EOFError):
        return None


def main() -> NoReturn:
    """Start the worker and live as long as it does."""
    if len(sys.argv) > 1 and sys.argv[1].startswith(MODULE_FLAG):
        start_driver(sys.argv[1].removeprefix(MODULE_FLAG), sys.argv[2:])
    raylet = os.pidfd_open(os.getppid())
    address = os.environ.get(FORK_SERVER_VARIABLE)
    request = plan(sys.argv[1:], dict(os.environ)) if address else None
    answer = request_fork(request, address) if request and address else None
    if answer is None:
        os.execv(
            sys.executable,
            [sys.executable, "-P", "-m", "ray._private.workers.setup_worker", *sys.argv[1:]],
        )
    worker, _connection = answer
    last_as_long_as(worker, raylet)
    sys.exit(0)


if __name__ == "__main__":
    main()
