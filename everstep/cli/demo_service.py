"""The service that the demo uses: its own, or one that already runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.cli.terminal import Terminal
from everstep.client.client import Client
from everstep.errors import EverstepError, Unavailable
from everstep.options.serve import VARIABLES

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


SERVE = (
    *(sys.executable, "-m", "everstep.cli.main", "serve"),
    *("--port", "0", "--nodes", "3", "--cpus-per-node", "1", "--drills"),
)


class DemoFailed(EverstepError):
    """The demo cannot continue; the message says where to look."""

    code = "demo_failed"


@dataclass(frozen=True)
class Service:
    """The service that the demo uses."""

    client: Client
    home: Path
    pid: int | None
    """None if the demo did not start it."""

    @property
    def log(self) -> Path:
        return self.home / "serve.log"


def keep_log(service: Service) -> Path | None:
    """Copy the service's log out of its home directory, which is removed."""
    if service.pid is None or not service.log.exists():
        return None
    return Path(
        shutil.copy(service.log, Path(tempfile.mkdtemp(prefix="everstep-demo-")) / "serve.log")
    )


@contextlib.contextmanager
def own_service(terminal: Terminal, keep: bool) -> Iterator[Service]:
    """Start a service with three one-CPU nodes in a temporary home directory; stop all of it at the
    end."""
    # Ray's unix sockets are below it, and their paths are limited to 107 bytes.
    home = Path(tempfile.mkdtemp(prefix="es-", dir="/tmp" if Path("/tmp").is_dir() else None))
    terminal.note(
        "starting the service with a Ray cluster of three nodes on this machine (about 15 s)"
    )
    # without settings of a service: the demo's has a cluster and a database of its own
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with (home / "serve.log").open("ab") as log:
        process = subprocess.Popen(
            SERVE,
            env={"OMP_NUM_THREADS": "1", **inherited, "EVERSTEP_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C is for this process, which stops the service at its end
            start_new_session=True,
        )
    is_kept = False
    try:
        service = _await_ready(process, home)
        yield service
        is_kept = keep
    finally:
        if not is_kept:
            _stop(terminal, process, home)


def _await_ready(process: subprocess.Popen[bytes], home: Path) -> Service:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError, Unavailable):
            client = Client(
                (home / "url").read_text().strip(),
                (home / "token").read_text().strip(),
                max_tries=3,
            )
            state = client.ready()
            if state.status == "ready" and state.ray == "up":
                return Service(client, home, process.pid)
        time.sleep(0.1)
    ended = process.poll()
    what = (
        f"did not become ready in {START_TIMEOUT_S:g} s"
        if ended is None
        else f"ended with exit code {ended}"
    )
    tail = "\n".join((home / "serve.log").read_text(errors="replace").splitlines()[-15:])
    raise DemoFailed(f"the service {what}; its log ends:\n{tail}")


def _stop(terminal: Terminal, process: subprocess.Popen[bytes], home: Path) -> None:
    """Stop the service gracefully, which stops its cluster; kill it after a timeout. Signals are
    ignored meanwhile."""
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        if process.poll() is None:
            terminal.note("stopping the service and its nodes")
            process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        kill_all_of(home)
        shutil.rmtree(home, ignore_errors=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_all_of(home: Path) -> None:
    """Send SIGKILL to every process of the service of ``home``, found by its EVERSTEP_HOME."""
    marker = f"EVERSTEP_HOME={home}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        pid = int(entry.parent.name)
        with contextlib.suppress(OSError):
            if pid != os.getpid() and marker in entry.read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
