"""The cluster's nodes as an administrator handles them, as ``client.nodes``."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from everstep.client.follow import Patience, wait_until
from everstep.client.transport import Transport
from everstep.errors import Conflict, NotFound, Unavailable, UsageError
from everstep.wire import ClusterInfo, Node

_SHOWN = 12


class Nodes:
    """Cordon, uncordon and drain; ``client.cluster()`` shows all nodes with their states.

    >>> node = client.nodes.find("3f2a")                             # doctest: +SKIP
    >>> client.nodes.drain(node.id, deadline_s=300, reason="disk")   # doctest: +SKIP
    >>> client.nodes.wait_drained(node.id, timeout_s=300)            # doctest: +SKIP
    """

    def __init__(self, transport: Transport, patience: Patience) -> None:
        self._transport = transport
        self._patience = patience

    def cordon(self, node_id: str, *, reason: str | None = None) -> Node:
        """Let no new rank go to a node; ranks that are there stay. Raises NotFound, Conflict for a
        dead node, AuthError."""
        return self._order(node_id, "cordon", {"reason": reason})

    def uncordon(self, node_id: str, *, reason: str | None = None) -> Node:
        """Open a cordoned or draining node again. Raises NotFound, AuthError."""
        return self._order(node_id, "uncordon", {"reason": reason})

    def drain(
        self, node_id: str, *, deadline_s: float | None = None, reason: str | None = None
    ) -> Node:
        """Let ranks save, leave a node at once and move to others; returns while they do.

        Args:
            node_id: The node's whole id; ``find`` gives it for a part.
            deadline_s: seconds from now at which the node is to be taken away, for those who look
                at the cluster.
            reason: why, in words.

        Raises NotFound, Conflict for a dead node, AuthError.
        """
        return self._order(node_id, "drain", {"reason": reason, "deadline_s": deadline_s})

    def get(self, node_id: str) -> Node:
        """One node by its whole id. Raises NotFound; Unavailable where Ray does not answer."""
        for node in self._cluster().nodes:
            if node.id == node_id:
                return node
        raise NotFound(f"node {node_id} is not in the cluster")

    def find(self, prefix: str) -> Node:
        """The one node whose id begins so. Raises NotFound, UsageError where several do,
        Unavailable where Ray does not answer."""
        nodes = self._cluster().nodes
        found = [node for node in nodes if prefix and node.id.startswith(prefix)]
        exact = [node for node in found if node.id == prefix]
        if len(exact or found) > 1:
            raise UsageError(
                f"{prefix!r} begins the ids of {len(found)} nodes ({_names(found)}); give more of "
                "the id"
            )
        if not found:
            known = f"; its nodes are {_names(nodes)}" if nodes else ""
            raise NotFound(f"no node's id begins with {prefix!r} in the cluster{known}")
        return (exact or found)[0]

    def wait_drained(self, node_id: str, timeout_s: float | None = None) -> Node:
        """Wait until every rank has left a draining node. One that died is returned as well:
        nothing is on it any more.

        A service or a Ray that is away for a while does not end the waiting. Raises WaitTimeout
        after ``timeout_s`` seconds with the runs that are still there, Conflict where nobody drains
        the node, or no longer, Unavailable if they stay away.
        """
        node: Node | None = None

        def look() -> None:
            nonlocal node
            node = self.get(node_id)

        def drained() -> bool:
            if node is None or node.state == "DRAINING":
                return False
            if node.state not in ("DRAINED", "DEAD"):
                raise Conflict(f"node {node_id} is {node.state}; nobody drains it now")
            return True

        def late() -> str:
            there = (
                f"ranks of {', '.join(node.runs)}"
                if node is not None and node.runs
                else "no run that this token may see"
            )
            return f"node {node_id} is not drained after {timeout_s:g} s; on it: {there}"

        wait_until(drained, look, late, self._transport.timing, self._patience, timeout_s=timeout_s)
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
            raise Unavailable("Ray does not answer, so that its nodes are not known; try again")
        return info


def _names(nodes: tuple[Node, ...] | list[Node]) -> str:
    return ", ".join(node.id[:_SHOWN] for node in nodes)
