"""The Ray cluster as the API shows it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping

from everstep.events import EventKind
from everstep.wire import ClusterInfo, Node
from service.db.events import EventStore
from service.db.runs import RunStore
from service.embedded.note import ClusterNote
from service.ray_jobs import RayError, RayJobs


class ClusterView:
    """Answers what users ask about the cluster, from Ray and from what runs reported.

    Args:
        ray: The cluster.
        note: What the embedded cluster's keeper says now; None for another's cluster.
        runs: Runs.
        events: Their histories.
    """

    def __init__(self, ray: RayJobs, note: Callable[[], ClusterNote | None] | None, runs: RunStore, events: EventStore) -> None:
        self._ray = ray
        self._note = note
        self._runs = runs
        self._events = events

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
        runs_by_node = await asyncio.to_thread(self._runs_by_node)
        shown = tuple(
            Node(
                id=node.node_id,
                hostname=node.hostname,
                ip=node.ip,
                state=node.state,
                is_head=node.is_head,
                resources_total=dict(node.resources),
                runs=runs_by_node.get(node.node_id, ()),
            )
            for node in sorted(nodes, key=lambda node: (node.state == "DEAD", not node.is_head, node.hostname, node.node_id))
        )
        return ClusterInfo(available=True, address=address, dashboard_url=self._ray.url, ray_version=version, nodes=shown)

    def _runs_by_node(self) -> Mapping[str, tuple[str, ...]]:
        """Ids of the runs that have ranks on each node, as their newest worker groups reported."""
        found: dict[str, list[str]] = defaultdict(list)
        for run in self._runs.live():
            if run.world_size is None:
                continue
            groups = self._events.of_kinds(run.id, {EventKind.ATTEMPT_STARTED.value})
            workers = groups[-1].data.get("workers", []) if groups else []
            for node_id in sorted({worker["node_id"] for worker in workers}):
                found[node_id].append(run.id)
        return {node_id: tuple(run_ids) for node_id, run_ids in found.items()}
