"""The node that the demo kills, in the embedded cluster of a service on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.errors import UsageError
from everstep.wire import WorkerInfo

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
