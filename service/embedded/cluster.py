"""The embedded Ray cluster as the service sees it: adopt, start, stop.

It talks to the keeper by files and signals.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import structlog
from ray._private.node import Node
from ray._private.parameter import RayParams

from everstep.options.serve import VARIABLES
from service.cluster.cluster_view import ClusterNote, NodeNote, read_note
from service.embedded import worker_start
from service.embedded.environment import (
    HEAD_VARIABLES,
    NODE_CORES_VARIABLE,
    PRELOADED_MODULES,
    WORKER_NODE_VARIABLES,
    cluster_environment,
)
from service.embedded.processes import end_members, lives
from service.settings import Settings
from storage.files.protocol import draft_beside

START_TIMEOUT_S = 780.0
"""Longest wait for a cluster. The keeper gives up earlier: it waits GIVE_UP_S for the head and for
the first node, and one more try for each, some times 60 s for several nodes."""
SAY_S = 15.0
STOP_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.1
# The path of a unix socket has at most 107 bytes, and Ray appends about 85 to the base.
LONGEST_BASE = 18

log = structlog.get_logger(__name__)


class ClusterError(Exception):
    """The embedded cluster did not start. The message names the log."""


@dataclass(frozen=True)
class _Begun:
    """A cluster whose keeper runs, and which may not be ready yet."""

    keeper_pid: int
    adopts: bool
    """Whether the cluster was there before."""
    at: float = field(default_factory=time.monotonic)


class EmbeddedCluster:
    """The Ray cluster of one home directory.

    The caller holds the home's lock, so that no other service starts or stops it.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._child: int | None = None
        """Pid of the keeper that this process started, until it is reaped."""
        self._begun: _Begun | None = None
        self._given_up = threading.Event()

    def note(self) -> ClusterNote | None:
        """Return the keeper's newest note."""
        return read_note(self._settings.cluster_path)

    def is_running(self) -> bool:
        """Return whether the keeper lives and the cluster is ready. Reads one file and one
        process."""
        self._reap()
        note = self.note()
        return note is not None and note.state == "ready" and lives(note.keeper_pid, note.temp_dir)

    def begin(self) -> None:
        """Find the keeper of the running cluster, or remove the remnants of a dead one and start a
        new one. Does not wait until the cluster is ready."""
        if self._begun is None:
            self._begun = self._found_or_started()

    def ensure_running(self) -> ClusterNote:
        """Adopt the running cluster or start one, and wait until it is ready.

        Raises ClusterError.
        """
        self.begin()
        begun, self._begun = self._begun, None
        assert begun is not None
        note = self._await_ready(begun.keeper_pid)
        if begun.adopts:
            return self._adopt(note)
        log.info(
            "embedded Ray cluster is ready",
            seconds=round(time.monotonic() - begun.at, 1),
            dashboard=note.dashboard_url,
        )
        return note

    def give_up(self) -> None:
        """Let ``ensure_running`` raise ClusterError instead of waiting on, now and later."""
        self._given_up.set()

    def stop(self) -> None:
        """End every process of the cluster, if there is one."""
        note = self.note()
        if note is not None and lives(note.keeper_pid, note.temp_dir):
            log.info("stopping the embedded cluster", nodes=len(note.nodes))
            with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
                keeper = psutil.Process(note.keeper_pid)
                keeper.send_signal(signal.SIGTERM)
                keeper.wait(STOP_TIMEOUT_S)
        self._reap()
        self._clear_remnants()

    def token(self) -> str:
        """Return the cluster's Ray token. The first call creates it."""
        path = self._settings.ray_token_path
        # Written to a draft and linked into place, so that nobody reads half a token.
        with contextlib.suppress(FileExistsError), draft_beside(path) as draft:
            Path(draft).touch(mode=0o600)
            Path(draft).write_text(secrets.token_hex(32))
            os.link(draft, path)
        return path.read_text().strip()

    def _found_or_started(self) -> _Begun:
        note, settings = self.note(), self._settings
        if note is not None and lives(note.keeper_pid, note.temp_dir):
            return _Begun(note.keeper_pid, adopts=True)
        if note is not None and _head_lives(note):
            log.warning(
                "the embedded cluster lost its keeper; starting another", address=note.address
            )
            return _Begun(self._spawn(note.temp_dir, "--adopt"), adopts=True)
        self._clear_remnants()
        log.info(
            "starting an embedded Ray cluster",
            nodes=settings.nodes,
            cpus_per_node=settings.cpus_per_node,
        )
        base, prefix = self._temp_place()
        return _Begun(self._spawn(tempfile.mkdtemp(prefix=prefix, dir=base)), adopts=False)

    def _adopt(self, note: ClusterNote) -> ClusterNote:
        settings, workers = self._settings, len(note.nodes) - 1
        log.info(
            "adopted the running embedded cluster",
            address=note.address,
            nodes=workers,
            dashboard=note.dashboard_url,
        )
        if (note.num_nodes, note.cpus_per_node) != (settings.nodes, settings.cpus_per_node):
            log.warning(
                "the running cluster has another size; stop and start the service to change it",
                running=f"{note.num_nodes} x {note.cpus_per_node} CPU",
                set=f"{settings.nodes} x {settings.cpus_per_node} CPU",
            )
        if workers < note.num_nodes:
            log.info("replacing dead nodes", missing=note.num_nodes - workers)
            with contextlib.suppress(ProcessLookupError):
                os.kill(note.keeper_pid, signal.SIGUSR1)
        return note

    def _spawn(self, temp_dir: str, *flags: str) -> int:
        """Start a keeper and return its pid. Its own session keeps signals of a terminal away."""
        settings = self._settings
        self.token()
        env = cluster_environment(
            os.environ,
            temp_dir=temp_dir,
            token_path=settings.ray_token_path,
            cpus_per_node=settings.cpus_per_node,
            patterns=settings.cluster_variables,
        )
        # The service's own options are of no use to ranks.
        if left_out := sorted(os.environ.keys() - env.keys() - VARIABLES):
            log.info(
                "the cluster does not inherit these variables; pass one on with --cluster-env NAME",
                names=" ".join(left_out),
            )
        size = ["--nodes", str(settings.nodes), "--cpus-per-node", str(settings.cpus_per_node)]
        returns = ["--node-return-s", str(settings.node_return_s)]
        keeper = [sys.executable, "-P", "-m", "service.embedded.keeper", str(settings.home)]
        command = [*keeper, "--temp-dir", temp_dir, *size, *returns, *flags]
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._child = os.posix_spawn(
            sys.executable,
            command,
            env,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(settings.cluster_log_path), append, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        return self._child

    def _reap(self) -> None:
        """Collect the exit status of an ended keeper, which would stay as a zombie."""
        if self._child is not None:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self._child, os.WNOHANG)[0] == 0:
                    return
            self._child = None

    def _await_ready(self, keeper_pid: int) -> ClusterNote:
        began = said_at = time.monotonic()
        while (now := time.monotonic()) < began + START_TIMEOUT_S:
            note = self.note()
            if now - said_at >= SAY_S:
                said_at, what = now, (note and note.waiting_for) or "the keeper to start"
                log.info(
                    "the embedded cluster is not ready yet",
                    seconds=round(now - began),
                    waiting_for=what,
                )
            if note is not None and note.keeper_pid == keeper_pid and note.state == "ready":
                return note
            self._reap()
            if not psutil.pid_exists(keeper_pid):
                raise ClusterError(
                    "the embedded Ray cluster did not start; see "
                    f"{self._settings.cluster_log_path}:\n{self._log_tail()}"
                )
            if self._given_up.wait(POLL_INTERVAL_S):
                raise ClusterError("the service stops before its embedded Ray cluster is ready")
        raise ClusterError(
            f"the embedded Ray cluster was not ready within {START_TIMEOUT_S:g} s; see "
            f"{self._settings.cluster_log_path}"
        )

    def _log_tail(self, num_lines: int = 12) -> str:
        lines = self._settings.cluster_log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def _clear_remnants(self) -> None:
        """End the processes and remove the directories of this home's dead clusters."""
        base, prefix = self._temp_place()
        for remnant in base.glob(f"{prefix}*"):
            if ended := end_members(str(remnant), grace_s=0):
                log.warning(
                    "ended processes of a dead cluster", count=ended, directory=str(remnant)
                )
            shutil.rmtree(remnant, ignore_errors=True)
        self._settings.cluster_path.unlink(missing_ok=True)

    def _temp_place(self) -> tuple[Path, str]:
        """Return base directory and name prefix of this home's clusters.

        The home determines both, so that remnants are always found.
        """
        base = tempfile.gettempdir()
        digest = hashlib.sha256(str(self._settings.home.resolve()).encode()).hexdigest()[:8]
        return Path(base if len(base) <= LONGEST_BASE else "/tmp"), f"es-{digest}-"


def _head_lives(note: ClusterNote) -> bool:
    pids = (note.gcs_pid, note.dashboard_pid, note.head.raylet_pid if note.head else None)
    return note.state == "ready" and all(lives(pid, note.temp_dir) for pid in pids)


# ---------------------------------------------------------------- cluster parts

# Start the parts of a cluster: the fork server, the head, and worker nodes.
#
# This module imports ray, so only the keeper imports it.

OBJECT_STORE_BYTES = 100 * 1024 * 1024
LOOPBACK = "127.0.0.1"
HEAD_DIR = "head"
FORK_SOCKET = "fork.sock"
AGENT_PORTS = (
    "runtime_env_agent_port",
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
)
FIRST_PORT = 20_000
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Lets malloc ask for huge pages where the system leaves the choice to programs. Source: glibc's
manual, "Memory Allocation Tunables"."""


def start_fork_server(temp_dir: str) -> int:
    """Start the process that forks into workers, and return its pid. Workers that raylets ask for
    before its imports are done wait for them.

    Its malloc, and so theirs, asks the kernel for huge pages, unless the operator set
    GLIBC_TUNABLES. A process reads this variable only when it starts.
    """
    path = _fork_socket(temp_dir)
    path.unlink(missing_ok=True)
    module = "train_fn.ray_train.fork_server"
    command = [sys.executable, "-P", "-m", module, str(path), *PRELOADED_MODULES]
    return os.posix_spawn(sys.executable, command, {"GLIBC_TUNABLES": HUGE_PAGES, **os.environ})


def start_head(note: ClusterNote, *, names_ports: bool = False) -> ClusterNote:
    """Start the head, and return the note with its address and processes.

    Args:
        names_ports: give its agents their ports (see ``agent_ports``).
    """
    params = RayParams(
        **_params(note, HEAD_DIR, num_cpus=0),
        **_ports(note, 0, names_ports),
        include_dashboard=True,
        dashboard_host=LOOPBACK,
        dashboard_port=0,
        no_monitor=True,
        env_vars=_variables(note, HEAD_VARIABLES),
        ray_client_server_port=None,
    )
    node = Node(params, head=True, shutdown_at_exit=False, spawn_reaper=False)
    # A job's supervisor looks for "the" cluster of this machine, and without this file it may find
    # another one.
    (Path(note.temp_dir) / HEAD_DIR / "ray_current_cluster").write_text(node.gcs_address)
    pids = {name: info[0].process.pid for name, info in node.all_processes.items()}
    return replace(
        note,
        address=node.gcs_address,
        dashboard_url=f"http://{node.webui_url}",
        gcs_pid=pids["gcs_server"],
        dashboard_pid=pids["dashboard"],
        nodes=(_note_of(node, slot=0),),
    )


def start_node(note: ClusterNote, slot: int, *, names_ports: bool = False) -> NodeNote:
    """Start the raylet of a worker node.

    It has a directory of its own: nodes that start side by side in one would take each other's
    socket names.

    Args:
        names_ports: give its agents their ports (see ``agent_ports``).
    """
    generation = len(list(Path(note.temp_dir).glob(f"n{slot}.*")))
    gpus = _gpus_by_node(note.num_nodes)[slot - 1]
    env = _variables(note, WORKER_NODE_VARIABLES)
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    cores = cores_of(slot, note, sorted(os.sched_getaffinity(0)))
    env[NODE_CORES_VARIABLE] = ",".join(map(str, cores))
    params = RayParams(
        **_params(note, f"n{slot}.{generation}", num_cpus=note.cpus_per_node, num_gpus=len(gpus)),
        **_ports(note, slot, names_ports),
        gcs_address=note.address,
        node_manager_port=0,
        env_vars=env,
    )
    return _note_of(Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False), slot)


def cores_of(slot: int, note: ClusterNote, cores: Sequence[int]) -> Sequence[int]:
    """Return the cores that the ranks of a node stay on, or none.

    A node has cores of its own if the nodes' CPUs are exactly ``cores``. Ranks that move lose what
    their core's caches hold. If there are spare cores, other processes use those.
    """
    if len(cores) != note.num_nodes * note.cpus_per_node:
        return ()
    return cores[(slot - 1) * note.cpus_per_node : slot * note.cpus_per_node]


def _fork_socket(temp_dir: str) -> Path:
    return Path(temp_dir) / FORK_SOCKET


def _variables(note: ClusterNote, variables: Mapping[str, str]) -> dict[str, str]:
    return {**variables, worker_start.FORK_SERVER_VARIABLE: str(_fork_socket(note.temp_dir))}


def _params(note: ClusterNote, name: str, *, num_cpus: int, num_gpus: int = 0) -> dict[str, object]:
    return {
        "temp_dir": str(Path(note.temp_dir) / name),
        "node_ip_address": LOOPBACK,
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "object_store_memory": OBJECT_STORE_BYTES,
        "min_worker_port": 0,
        "max_worker_port": 0,
        # Everstep writes rank logs itself; Ray's log monitor would repeat them in the driver.
        "include_log_monitor": False,
        # Forks a worker instead of starting Python and importing torch again.
        "setup_worker_path": worker_start.__file__,
    }


def _ports(note: ClusterNote, slot: int, names: bool) -> dict[str, int]:
    return agent_ports(slot, note.num_nodes + 1) if names else {"dashboard_agent_listen_port": 0}


def agent_ports(slot: int, num_slots: int) -> dict[str, int]:
    """Return a free port for each agent of a node, by the name of Ray's parameter. Nodes in other
    slots get others.

    A raylet waits 15 s for agents that choose their ports, which they do once they are up, and then
    ends (Ray 2.60). Where a machine is too busy for that, they are named. Elsewhere they are not:
    another process may take a port before its agent does. The ports are none that the kernel gives
    to connections, of which there are many.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(FIRST_PORT + slot, max(lowest, FIRST_PORT + 5000), num_slots)
    return dict(zip(AGENT_PORTS, filter(_is_free, random.sample(ports, len(ports))), strict=False))


def _is_free(port: int) -> bool:
    with socket.socket() as listener, contextlib.suppress(OSError):
        listener.bind((LOOPBACK, port))
        return True
    return False


def _note_of(node: Node, slot: int) -> NodeNote:
    raylet = node.all_processes["raylet"][0].process.pid
    services = [info.process.pid for infos in node.all_processes.values() for info in infos]
    agents = [child.pid for child in psutil.Process(raylet).children()]
    return NodeNote(
        node_id=node.node_id,
        is_head=slot == 0,
        slot=slot,
        raylet_pid=raylet,
        pids=tuple(sorted({*services, *agents})),
    )


def _gpus_by_node(num_nodes: int) -> list[list[str]]:
    """Return the GPU ids of each node, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    else:
        gpus = [str(index) for index, _ in enumerate(sorted(Path("/dev").glob("nvidia[0-9]*")))]
    return [gpus[index::num_nodes] for index in range(num_nodes)]
