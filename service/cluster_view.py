"""The Ray cluster as the API shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from everstep.wire import ClusterInfo, Node
from service.embedded.note import ClusterNote
from service.ray_jobs import RayError, RayJobs


class ClusterView:
    """Answers what users ask about the cluster. Which runs are on a node is not known here: the API adds them.

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
            return ClusterInfo(available=False, address=address, dashboard_url=self._ray.url, ray_version=None, nodes=())
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
            for node in sorted(nodes, key=lambda node: (node.state == "DEAD", not node.is_head, node.hostname, node.node_id))
        )
        return ClusterInfo(available=True, address=address, dashboard_url=self._ray.url, ray_version=version, nodes=shown)
