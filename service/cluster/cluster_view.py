"""The Ray cluster as the API shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from everstep.wire import ClusterInfo, Node, NodeMark, NodeState
from service.cluster.cluster_note import ClusterNote
from service.cluster.ray_errors import RayError
from service.cluster.ray_jobs import RayJobs
from service.model.rows import NodeMarkRow

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
            coming_back=tuple(datetime.fromtimestamp(at, UTC) for at in coming),
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
        at=datetime.fromtimestamp(row.at, UTC),
        deadline=None if row.deadline is None else datetime.fromtimestamp(row.deadline, UTC),
    )
    state: NodeState = node.state
    if state != "DEAD" and row.state == "draining":
        state = "DRAINING" if has_ranks or now - row.at < HEARD_S else "DRAINED"
    elif state == "ALIVE":
        state = "CORDONED"
    return node.model_copy(update={"state": state, "mark": mark})
