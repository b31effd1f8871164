"""The Ray cluster as the API shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import TypeAdapter

from everstep.wire import ClusterInfo, Node, NodeMark, NodeState
from service.cluster.ray_jobs import RayError, RayJobs
from service.model.rows import NodeMarkRow, maybe_time, past, to_time
from storage.files.protocol import draft_beside

HEARD_S: Final = 3.0
"""Seconds until all drivers have read a new mark: they read marks about once a second. Before that
a node without ranks may still get one."""


class ClusterView:
    """Describes the cluster for users. The API adds the runs and the mark of each node.

    Args:
        ray: The cluster.
        note: Reads the embedded cluster's note; None for an existing cluster.
    """

    def __init__(self, ray: RayJobs, note: Callable[[], ClusterNote | None] | None) -> None:
        self._ray = ray
        self._note = note

    @property
    def dashboard_url(self) -> str | None:
        """Base URL of Ray's dashboard without a trailing slash, or None while no cluster runs."""
        return self._ray.url

    async def cluster(self) -> ClusterInfo:
        """Return the cluster now. If Ray does not answer, it is not ``available`` and has no
        nodes."""
        note = self._note() if self._note else None
        address = note.address if note else None
        coming = note.coming_back if note else ()
        try:
            version, nodes = await asyncio.gather(self._ray.version(), self._ray.nodes())
        except RayError:
            return ClusterInfo(
                available=False,
                address=address,
                dashboard_url=self._ray.url,
                ray_version=None,
                nodes=(),
            )
        shown = tuple(
            Node(
                id=node.node_id,
                hostname=node.hostname,
                ip=node.ip,
                state=node.state,
                is_head=node.is_head,
                resources_total=dict(node.resources),
                resources_used=None if node.used is None else dict(node.used),
                load=node.load,
                runs=(),
            )
            for node in sorted(
                nodes,
                key=lambda node: (
                    node.state == "DEAD",
                    not node.is_head,
                    node.hostname,
                    node.node_id,
                ),
            )
        )
        return ClusterInfo(
            available=True,
            address=address,
            dashboard_url=self._ray.url,
            ray_version=version,
            nodes=shown,
            coming_back=tuple(map(to_time, coming)),
        )


def with_mark(node: Node, row: NodeMarkRow | None, *, has_ranks: bool, now: float) -> Node:
    """Return the node in the state that its mark gives it.

    Args:
        node: As Ray describes it. A drain by Ray takes precedence over a cordon.
        row: Its newest mark, or None.
        has_ranks: Whether ranks of any run are on it.
        now: Unix seconds.
    """
    if row is None or row.state == "open":
        return node
    mark = NodeMark(
        reason=row.reason,
        by=row.by,
        at=to_time(row.at),
        deadline=maybe_time(row.deadline),
    )
    state: NodeState = node.state
    if state != "DEAD" and row.state == "draining":
        state = "DRAINING" if has_ranks or now - past(row.at, now) < HEARD_S else "DRAINED"
    elif state == "ALIVE":
        state = "CORDONED"
    return node.model_copy(update={"state": state, "mark": mark})


# ---------------------------------------------------------------- cluster note

# cluster.json: the description of the embedded cluster, which its keeper writes.


@dataclass(frozen=True)
class NodeNote:
    """One Ray node of the embedded cluster: a raylet with what it started."""

    node_id: str
    is_head: bool
    slot: int
    """Place among the nodes, 0 for the head. A replacement gets the dead node's slot."""
    raylet_pid: int
    pids: tuple[int, ...]
    """The raylet and its agents; on the head also the GCS and the dashboard. Workers are not
    listed."""


@dataclass(frozen=True)
class ClusterNote:
    """The embedded cluster of one home directory."""

    state: Literal["starting", "ready"]
    keeper_pid: int
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


_NOTE: Final = TypeAdapter(ClusterNote)


def read_note(path: Path) -> ClusterNote | None:
    """Return the note at ``path``, or None if it is missing or damaged. Fields of another version's
    keeper are ignored."""
    try:
        return _NOTE.validate_json(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def write_note(path: Path, note: ClusterNote) -> None:
    """Replace the note at ``path`` atomically."""
    with draft_beside(path) as draft:
        Path(draft).write_bytes(_NOTE.dump_json(note, indent=1) + b"\n")
        Path(draft).replace(path)
