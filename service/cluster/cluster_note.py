"""cluster.json: the description of the embedded cluster, which its keeper writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from storage.files.draft import draft_beside


@dataclass(frozen=True)
class NodeNote:
    """One Ray node of the embedded cluster: a raylet with what it started."""

    node_id: str
    is_head: bool
    slot: int
    """Place among the nodes, 0 for the head. A replacement gets the dead node's slot."""
    raylet_pid: int
    raylet_started_at: float
    """Unix seconds."""
    port: int
    """Port of the raylet's service on loopback."""
    pids: tuple[int, ...]
    """The raylet and its agents; on the head also the GCS and the dashboard. Workers are not
    listed."""


@dataclass(frozen=True)
class ClusterNote:
    """The embedded cluster of one home directory."""

    state: Literal["starting", "ready"]
    keeper_pid: int
    keeper_started_at: float
    """Unix seconds."""
    temp_dir: str
    """Directory with the sockets and logs of all nodes. Its unique name is in the environment of
    each process of the cluster."""
    num_nodes: int
    """Worker nodes that the keeper maintains."""
    cpus_per_node: int
    address: str | None = None
    """Address of the GCS, host:port."""
    dashboard_url: str | None = None
    gcs_pid: int | None = None
    dashboard_pid: int | None = None
    fork_server_pid: int | None = None
    """Parent of all workers. Without it the raylets start workers themselves, which is slower."""
    nodes: tuple[NodeNote, ...] = ()
    """Live nodes, the head first."""
    coming_back: tuple[float, ...] = ()
    """When dead nodes are started again, in unix seconds, soonest first."""
    waiting_for: str | None = None
    """The part of the start that takes long, for log lines."""
    makes_way: bool = False
    """Whether SIGUSR2 asks the keeper to let the control processes run beside the ranks for a
    while. The keeper of an older version would end."""

    @property
    def head(self) -> NodeNote | None:
        """The head node, or None before it is up."""
        return next((node for node in self.nodes if node.is_head), None)

    @property
    def lasting_pids(self) -> list[int]:
        """The processes whose end the keeper must notice at once."""
        raylets = [node.raylet_pid for node in self.nodes]
        pids = (self.gcs_pid, self.dashboard_pid, self.fork_server_pid, *raylets)
        return [pid for pid in pids if pid]


def read_note(path: Path) -> ClusterNote | None:
    """Return the note at ``path``, or None if it is missing or damaged."""
    try:
        raw = json.loads(path.read_text())
        return _from_json(raw)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def write_note(path: Path, note: ClusterNote) -> None:
    """Replace the note at ``path`` atomically."""
    with draft_beside(path) as draft:
        Path(draft).write_text(json.dumps(asdict(note), indent=1) + "\n")
        Path(draft).replace(path)


def _from_json(raw: Mapping[str, Any]) -> ClusterNote:
    nodes = tuple(NodeNote(**{**node, "pids": tuple(node["pids"])}) for node in raw["nodes"])
    return ClusterNote(**{**raw, "nodes": nodes, "coming_back": tuple(raw.get("coming_back", ()))})
