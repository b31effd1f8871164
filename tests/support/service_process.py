"""A real Everstep service with its embedded cluster, as its own processes, for tests and
benchmarks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx
import psutil

from everstep import Client

T = TypeVar("T")

ASK_S = 0.2
"""Between two questions to a service, which answers with the CPU that ranks need."""
START_S = 360.0
"""Longest start of a service: no shorter than the service itself is patient with its cluster."""
NO_CORDON = {"EVERSTEP_CORDON_RUNS": "0", "EVERSTEP_CORDON_FAILURES": "0"}
"""What is broken on purpose, again and again, is not the nodes' fault."""


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process is gone, at the latest while it is looked at, or is a zombie."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(
    fact: Callable[[], T | None], timeout_s: float, what: str, *, every_s: float = 0.05
) -> T:
    """The first truthy value of ``fact``, asked every so often; fails with ``what`` when none came
    in time.

    The last question begins after that: a machine that stood still may have cut the one before it
    off.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        is_last = time.monotonic() > deadline
        if value := fact():
            return value
        if is_last:
            raise TimeoutError(f"{what} did not happen within {timeout_s:g} s")
        time.sleep(every_s)


def wait_until_ready(
    process: subprocess.Popen[bytes],
    url: str,
    log: Callable[[], str],
    timeout_s: float,
    what: str,
    *,
    answer_s: float = 5.0,
) -> None:
    """Until a service's /readyz is well; each answer may take ``answer_s``.

    Raises TimeoutError and, where the service has ended, RuntimeError, both with the last answer
    and the end of its log.
    """
    answer = "none"

    def is_ready() -> bool:
        nonlocal answer
        if process.poll() is not None:
            raise RuntimeError(f"serve ended with {process.returncode}:\n{log()[-4000:]}")
        try:
            response = httpx.get(f"{url}/readyz", timeout=answer_s, trust_env=False)
        except httpx.HTTPError as exc:
            answer = repr(exc)
            return False
        answer = f"{response.status_code} {response.text}"
        return response.status_code == 200

    try:
        wait_for(is_ready, timeout_s, what)
    except TimeoutError as exc:
        raise TimeoutError(f"{exc}: {url} last answered {answer}:\n{log()[-4000:]}") from None


class ServiceProcess:
    """``everstep serve`` on a home directory of its own; a context manager that
    leaves nothing behind."""

    def __init__(
        self,
        *,
        nodes: int = 2,
        cpus_per_node: int = 1,
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ):
        """``prefix`` is a command that runs the service, as ``nice`` does."""
        self.num_nodes = nodes
        self.home = Path(tempfile.mkdtemp(prefix="es-"))
        self.port = free_port()
        self.args = ("--nodes", str(nodes), "--cpus-per-node", str(cpus_per_node), *args)
        self.env = env or {}
        self.prefix = prefix
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServiceProcess:
        try:
            self.start()
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._clean()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def token(self) -> str:
        return (self.home / "token").read_text().strip()

    def client(self) -> Client:
        return Client(self.url, self.token)

    @contextmanager
    def tidy_client(self) -> Iterator[Client]:
        """A client; every node is open again afterwards, and no run is left."""
        with self.client() as made:
            yield made
            for run in made.runs.list(status=["QUEUED", "STARTING", "RUNNING", "RECOVERING"]):
                run.cancel()
                wait_for(lambda run=run: run.refresh().status.terminal, 120, f"the end of {run.id}")
            for node in made.cluster().nodes:
                if node.mark is not None:
                    made.nodes.uncordon(node.id)

    def cluster(self) -> dict[str, Any]:
        return dict(json.loads((self.home / "cluster.json").read_text()))

    def launch(self, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start the process without waiting for it to be ready."""
        with (self.home / "serve.log").open("ab") as log:
            command = [sys.executable, "-P", "-m", "everstep.cli.main", "serve"]
            self.process = subprocess.Popen(
                [*self.prefix, *command, "--port", str(self.port), *self.args],
                env={
                    **os.environ,
                    "EVERSTEP_HOME": str(self.home),
                    "OMP_NUM_THREADS": "1",
                    **NO_CORDON,
                    # A node that a test kills stays dead, unless the test wants it back.
                    "EVERSTEP_NODE_RETURN_S": "0",
                    **self.env,
                    **(env or {}),
                },
                cwd=self._strange_directory(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self.process

    def _strange_directory(self) -> Path:
        """Return a directory of somebody else's modules, named like ours: none may be imported."""
        directory = self.home / "strange"
        directory.mkdir(exist_ok=True)
        for name in ("everstep", "service", "storage", "train_fn", "ray"):
            (directory / f"{name}.py").write_text(f"raise AssertionError('{name}.py of the cwd')")
        return directory

    def start(self, timeout_s: float = START_S) -> None:
        """Start service and cluster, and wait for both."""
        wait_until_ready(self.launch(), self.url, self.log, timeout_s, "the service's /readyz")
        wait_for(self._is_cluster_ready, timeout_s, "the cluster's start")

    def _is_cluster_ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"serve ended with {self.process.returncode}:\n{self.log()[-4000:]}")
        answer = httpx.get(f"{self.url}/readyz", timeout=30, trust_env=False).json()
        return bool(answer["ray"] == "up")

    def log(self) -> str:
        return (self.home / "serve.log").read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL of the service process alone; its cluster and runs go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> None:
        """The graceful way: ends service and cluster. A service that was killed is started again to
        take its cluster down."""
        if (
            self.process is not None
            and self.process.poll() is not None
            and (self.home / "cluster.json").exists()
        ):
            self.start()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill_node(self, node_id: str) -> None:
        """SIGKILL a node as a power cut would: its raylet and every process below it."""
        [node] = [node for node in self.cluster()["nodes"] if node["node_id"] == node_id]
        raylet = psutil.Process(node["raylet_pid"])
        for process in [raylet, *raylet.children(recursive=True)]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def refill(self) -> None:
        """Ask the keeper for a node in the place of each that died."""
        os.kill(self.cluster()["keeper_pid"], signal.SIGUSR1)

    def whole(self) -> bool:
        """Whether the cluster has all its nodes beside the head."""
        nodes = [node for node in self.cluster()["nodes"] if not node["is_head"]]
        return len(nodes) == self.num_nodes and all(
            psutil.pid_exists(node["raylet_pid"]) for node in nodes
        )

    def mend(self) -> None:
        """Start what was killed: the service, and a node in the place of each that died. Waits
        until all are there."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        if not self.whole():
            self.refill()
            wait_for(self.whole, 180, "a whole cluster")

    def processes(self) -> list[psutil.Process]:
        """Every live process that belongs to this home, by its environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get("EVERSTEP_HOME") == str(self.home)
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def _clean(self) -> None:
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if self.process is not None:
            self.process.wait(10)
        shutil.rmtree(self.home, ignore_errors=True)
