"""cluster.json: what the embedded cluster's keeper says about it, and how others read it."""

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
    """Its place among the nodes, 0 for the head; a node that replaces a dead one takes its
    place."""
    raylet_pid: int
    raylet_started_at: float
    """Unix seconds."""
    port: int
    """Of the raylet's own service on loopback."""
    pids: tuple[int, ...]
    """The raylet and its agents; on the head also the GCS and the dashboard. Workers come and go
    and are not listed."""


@dataclass(frozen=True)
class ClusterNote:
    """The embedded cluster of one home directory."""

    state: Literal["starting", "ready"]
    keeper_pid: int
    keeper_started_at: float
    """Unix seconds."""
    temp_dir: str
    """Sockets and logs of all nodes; its unique name is in the environment of every process of the
    cluster."""
    num_nodes: int
    """Worker nodes that the keeper keeps."""
    cpus_per_node: int
    address: str | None = None
    """GCS, host:port."""
    dashboard_url: str | None = None
    gcs_pid: int | None = None
    dashboard_pid: int | None = None
    fork_server_pid: int | None = None
    """Parent of all workers; without it the raylets start them themselves, more slowly."""
    nodes: tuple[NodeNote, ...] = ()
    """Nodes that live, the head first."""
    waiting_for: str | None = None
    """What takes long while the cluster starts."""

    @property
    def head(self) -> NodeNote | None:
        return next((node for node in self.nodes if node.is_head), None)


def read_note(path: Path) -> ClusterNote | None:
    """The note at ``path``; None where there is none, or none that can be read."""
    try:
        raw = json.loads(path.read_text())
        return _from_json(raw)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def write_note(path: Path, note: ClusterNote) -> None:
    """Replace the note at ``path`` atomically: a reader sees the old one or the new one."""
    with draft_beside(path) as draft:
        Path(draft).write_text(json.dumps(asdict(note), indent=1) + "\n")
        Path(draft).replace(path)


def _from_json(raw: Mapping[str, Any]) -> ClusterNote:
    nodes = tuple(NodeNote(**{**node, "pids": tuple(node["pids"])}) for node in raw["nodes"])
    return ClusterNote(**{**raw, "nodes": nodes})
