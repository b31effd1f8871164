"""The loop: compare what Kubernetes announces with the service's marks, and ask for the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Final

from everstep.client.client import Client
from everstep.client.timing import Timing
from everstep.errors import Conflict, NotFound, RateLimited, Unavailable
from everstep.kubernetes.api import KubernetesApi
from everstep.kubernetes.mirror import Mirror, Say
from everstep.kubernetes.notices import LEAVING, Order, orders
from everstep.kubernetes.objects import KubeNode, RayPod

PERIOD_S: Final = 10.0
"""Seconds between two looks where nothing changes: a node may join Ray after its pod was seen."""


def _utc_now() -> datetime:
    return datetime.now(UTC)


class NodeWatcher:
    """Marks Ray's nodes as Kubernetes announces. Several at once ask for the same, which is
    harmless.

    Args:
        namespace: of the pods of the Ray cluster.
        selector: labels of those pods.
        keys: of taints that say that a node is about to go.
        say: takes a line for the log.
    """

    def __init__(
        self,
        client: Client,
        api: KubernetesApi,
        namespace: str,
        selector: str,
        *,
        keys: Collection[str] = LEAVING,
        say: Say = print,
        timing: Timing | None = None,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._client = client
        self._keys = keys
        self._say = say
        self._now = now
        self._timing = timing or Timing()
        self._changed = threading.Event()
        self._stopping = False
        self.nodes = Mirror(
            api, "/api/v1/nodes", KubeNode.of, self._changed, say=say, timing=self._timing
        )
        self.pods = Mirror(
            api,
            f"/api/v1/namespaces/{namespace}/pods",
            RayPod.of,
            self._changed,
            selector=selector,
            say=say,
            timing=self._timing,
        )

    def stop(self) -> None:
        """Let ``run`` return. A signal handler may call this."""
        self._stopping = True
        self._changed.set()

    def run(self) -> None:
        """Follow Kubernetes until ``stop`` is called.

        Keeps on while the service, Ray or Kubernetes does not respond. Raises AuthError, UsageError
        or ServiceError where waiting does not help.
        """
        self.nodes.start()
        self.pods.start()
        failures = 0
        pause_s = PERIOD_S
        while True:
            self._changed.wait(pause_s)
            if self._stopping:
                return
            self._changed.clear()
            try:
                self.tick()
                failures, pause_s = 0, PERIOD_S
            except (Unavailable, RateLimited) as exc:
                failures += 1
                pause_s = self._timing.backoff_s(failures, most_s=PERIOD_S)
                self._say(exc.message)

    def tick(self) -> tuple[Order, ...]:
        """Compare once, ask the service for what differs, and return it. Raises this package's
        errors."""
        for mirror in (self.nodes, self.pods):
            if mirror.problem is not None:
                raise mirror.problem
        nodes, pods = self.nodes.items, self.pods.items
        if nodes is None or pods is None:
            return ()
        cluster = self._client.cluster()
        if not cluster.available:
            raise Unavailable("Ray does not respond, so its nodes are unknown")
        found = orders(cluster.nodes, pods.values(), nodes, self._now(), self._keys)
        for order in found:
            self._send(order)
        return found

    def _send(self, order: Order) -> None:
        nodes = self._client.nodes
        try:
            if order.act == "drain":
                nodes.drain(order.node_id, deadline_s=order.deadline_s, reason=order.reason)
            elif order.act == "cordon":
                nodes.cordon(order.node_id, reason=order.reason)
            else:
                nodes.uncordon(order.node_id, reason=order.reason)
        except (Conflict, NotFound) as exc:  # it died meanwhile
            self._say(f"{order.act} {order.node_id}: {exc.message}")
            return
        self._say(f"{order.act} {order.node_id}: {order.reason}")
