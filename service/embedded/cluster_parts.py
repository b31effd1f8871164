"""Start the parts of a cluster: the fork server, the head, and worker nodes.

This module imports ray, so only the keeper imports it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
from ray._private.node import Node
from ray._private.parameter import RayParams

from service.cluster.cluster_note import ClusterNote, NodeNote
from service.embedded import worker_start
from service.embedded.environment import (
    HEAD_VARIABLES,
    NODE_CORES_VARIABLE,
    PRELOADED_MODULES,
    WORKER_NODE_VARIABLES,
)
from service.embedded.processes import started_at

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
    command = [sys.executable, "-m", "service.embedded.fork_server", str(path), *PRELOADED_MODULES]
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
        raylet_started_at=started_at(raylet),
        port=node.node_manager_port,
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
