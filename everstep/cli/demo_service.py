"""The service that the demo uses, its own or one that already runs, and the node that it kills."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.cli.terminal import Terminal
from everstep.client.client import Client
from everstep.errors import EverstepError, Unavailable, UsageError
from everstep.home import home_directory
from everstep.options.serve import VARIABLES
from everstep.wire import WorkerInfo

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


SERVE = (
    sys.executable,
    "-m",
    "service.process.serve",
    "--port",
    "0",
    "--nodes",
    "3",
    "--cpus-per-node",
    "1",
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


def existing(url: str) -> Service:
    """Return a service that already runs on this machine with an embedded cluster."""
    home = home_directory()
    if not (home / "cluster.json").exists():
        raise UsageError(
            f"{home} has no cluster.json, so the service has no cluster of its own; set "
            "EVERSTEP_HOME to the home of one that has"
        )
    return Service(Client(url), home, None)


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


# ---------------------------------------------------------------- demo node

# The node that the demo kills, in the embedded cluster of a service on this machine.


_START_TOLERANCE_S = 2.0


@dataclass(frozen=True)
class Victim:
    """A node and its rank."""

    node_id: str
    rank: int
    raylet_pid: int
    rank_pid: int


def choose_victim(cluster_file: Path, workers: Sequence[WorkerInfo]) -> Victim:
    """Return the node of the highest rank, never the head. Raise UsageError if no rank is on a node
    of ``cluster_file``."""
    try:
        noted: list[dict[str, Any]] = json.loads(cluster_file.read_text())["nodes"]
        nodes = {node["node_id"]: node for node in noted if not node["is_head"]}
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise UsageError(f"{cluster_file} does not describe an embedded cluster: {exc}") from exc
    for worker in sorted(workers, key=lambda worker: worker.rank, reverse=True):
        node = nodes.get(worker.node_id)
        if node is not None and is_process(node["raylet_pid"], node["raylet_started_at"]):
            return Victim(worker.node_id, worker.rank, node["raylet_pid"], worker.pid)
    raise UsageError(
        f"no rank of the run is on a node of {cluster_file}; the demo can only kill nodes of a "
        "service's own cluster"
    )


def kill(victim: Victim) -> None:
    """Send SIGKILL to the node's raylet and its rank, like a power cut. Other workers of the raylet
    exit by themselves."""
    for pid in (victim.raylet_pid, victim.rank_pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_process(pid: int, started_at: float) -> bool:
    """Return whether ``pid`` is still the process that started at ``started_at`` (unix seconds),
    not a later one with the same pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = next(
            line
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime ")
        )
    except (OSError, StopIteration):
        return not Path("/proc/self/stat").exists()  # unknown on a system without /proc
    ticks = float(stat.rpartition(")")[2].split()[19])
    return (
        abs(float(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK") - started_at)
        < _START_TOLERANCE_S
    )


def kill_all_of(home: Path) -> None:
    """Send SIGKILL to every process of the service of ``home``, found by its EVERSTEP_HOME."""
    marker = f"EVERSTEP_HOME={home}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        pid = int(entry.parent.name)
        with contextlib.suppress(OSError):
            if pid != os.getpid() and marker in entry.read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
