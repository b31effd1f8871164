"""The Ray cluster as the API shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from everstep.wire import ClusterInfo, Node, NodeMark, NodeState
from service.cluster.cluster_note import ClusterNote
from service.cluster.ray_jobs import RayError, RayJobs
from service.model.rows import NodeMarkRow

HEARD_S: Final = 3.0
"""Drivers look at the marks about once a second; before so long a node without a rank may be about
to get one."""


class ClusterView:
    """Answers what users ask about the cluster. Which runs are on a node, and how it is marked, is
    not known here: the API adds it.

    Args:
        ray: The cluster.
        note: What the embedded cluster's keeper says now; None for another's cluster.
    """

    def __init__(self, ray: RayJobs, note: Callable[[], ClusterNote | None] | None) -> None:
        self._ray = ray
        self._note = note

    @property
    def dashboard_url(self) -> str | None:
        """Base URL of Ray's dashboard without a trailing slash; None where no cluster runs now."""
        return self._ray.url

    async def cluster(self) -> ClusterInfo:
        """The cluster now; not ``available``, and without nodes, where Ray does not answer."""
        note = self._note() if self._note else None
        address = note.address if note else None
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
        )


def with_mark(node: Node, word: NodeMarkRow | None, *, has_ranks: bool, now: float) -> Node:
    """The node in the state that its mark gives it.

    Args:
        node: As Ray tells; its own drain of a node stands above a cordon.
        word: The last word about it; None where there is none.
        has_ranks: Whether ranks of any run are on it.
        now: Unix seconds.
    """
    if word is None or word.state == "open":
        return node
    mark = NodeMark(
        reason=word.reason,
        by=word.by,
        at=datetime.fromtimestamp(word.at, UTC),
        deadline=None if word.deadline is None else datetime.fromtimestamp(word.deadline, UTC),
    )
    state: NodeState = node.state
    if state != "DEAD" and word.state == "draining":
        state = "DRAINING" if has_ranks or now - word.at < HEARD_S else "DRAINED"
    elif state == "ALIVE":
        state = "CORDONED"
    return node.model_copy(update={"state": state, "mark": mark})
