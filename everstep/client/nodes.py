"""Manage the nodes of the cluster, as ``client.nodes``."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from everstep.client.follow import Patience, wait_until
from everstep.client.transport import Transport
from everstep.errors import Conflict, NotFound, Unavailable, UsageError
from everstep.wire import ClusterInfo, Node

_SHOWN = 12


class Nodes:
    """Cordon, uncordon and drain nodes; ``client.cluster()`` lists them with their states.

    >>> node = client.nodes.find("3f2a")                             # doctest: +SKIP
    >>> client.nodes.drain(node.id, deadline_s=300, reason="disk")   # doctest: +SKIP
    >>> client.nodes.wait_drained(node.id, timeout_s=300)            # doctest: +SKIP
    """

    def __init__(self, transport: Transport, patience: Patience) -> None:
        self._transport = transport
        self._patience = patience

    def cordon(self, node_id: str, *, reason: str | None = None) -> Node:
        """Place no new ranks on a node; its current ranks stay. Raise NotFound, Conflict for a dead
        node, AuthError."""
        return self._order(node_id, "cordon", {"reason": reason})

    def uncordon(self, node_id: str, *, reason: str | None = None) -> Node:
        """Allow ranks on a cordoned or draining node again. Raise NotFound, AuthError."""
        return self._order(node_id, "uncordon", {"reason": reason})

    def drain(
        self, node_id: str, *, deadline_s: float | None = None, reason: str | None = None
    ) -> Node:
        """Make ranks save, leave a node and move to others. Return at once; ``wait_drained`` waits.

        Args:
            node_id: whole id of the node; ``find`` returns it for a prefix.
            deadline_s: seconds from now at which the node will be removed, shown with the node.
            reason: free text, shown with the node.

        Raises NotFound, Conflict for a dead node, AuthError.
        """
        return self._order(node_id, "drain", {"reason": reason, "deadline_s": deadline_s})

    def get(self, node_id: str) -> Node:
        """Return one node by its whole id. Raise NotFound; Unavailable if Ray does not respond."""
        for node in self._cluster().nodes:
            if node.id == node_id:
                return node
        raise NotFound(f"node {node_id} is not in the cluster")

    def find(self, prefix: str) -> Node:
        """Return the node whose id starts with ``prefix``. Raise NotFound, UsageError if there are
        several, Unavailable if Ray does not respond."""
        nodes = self._cluster().nodes
        found = [node for node in nodes if prefix and node.id.startswith(prefix)]
        exact = [node for node in found if node.id == prefix]
        if len(exact or found) > 1:
            raise UsageError(
                f"{prefix!r} matches {len(found)} nodes ({_names(found)}); give more digits of the "
                "id"
            )
        if not found:
            known = f"; the cluster has {_names(nodes)}" if nodes else ""
            raise NotFound(f"no node id starts with {prefix!r}{known}")
        return (exact or found)[0]

    def wait_drained(self, node_id: str, timeout_s: float | None = None) -> Node:
        """Wait until every rank has left a draining node. Return it, also if it died.

        Keep waiting while the service or Ray is unreachable for a while. Raises WaitTimeout after
        ``timeout_s`` seconds, with the runs that are still there; Conflict if the node is not being
        drained, or no longer; Unavailable if service or Ray stay unreachable.
        """
        node: Node | None = None

        def fetch() -> None:
            nonlocal node
            node = self.get(node_id)

        def drained() -> bool:
            if node is None or node.state == "DRAINING":
                return False
            if node.state not in ("DRAINED", "DEAD"):
                raise Conflict(f"node {node_id} is {node.state}, not draining; drain it first")
            return True

        def late() -> str:
            there = (
                f"ranks of {', '.join(node.runs)}"
                if node is not None and node.runs
                else "no run that this token can see"
            )
            return f"node {node_id} is not drained after {timeout_s:g} s; on it: {there}"

        wait_until(
            drained, fetch, late, self._transport.timing, self._patience, timeout_s=timeout_s
        )
        assert node is not None
        return node

    def _order(self, node_id: str, order: str, body: dict[str, Any]) -> Node:
        given = {name: value for name, value in body.items() if value is not None}
        path = f"/v1/cluster/nodes/{quote(node_id, safe='')}/{order}"
        return self._transport.parse(
            self._transport.send("POST", path, body=given, repeatable=True), Node
        )

    def _cluster(self) -> ClusterInfo:
        info = self._transport.get("/v1/cluster", ClusterInfo)
        if not info.available:
            raise Unavailable("Ray does not respond, so its nodes are unknown; try again")
        return info


def _names(nodes: tuple[Node, ...] | list[Node]) -> str:
    return ", ".join(node.id[:_SHOWN] for node in nodes)
