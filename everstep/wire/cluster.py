"""The cluster and the service's own state."""

from __future__ import annotations

from typing import Literal

from everstep.wire.base import Answer, Time

NodeState = Literal["ALIVE", "CORDONED", "DRAINING", "DRAINED", "DEAD"]
"""``CORDONED``: no new rank goes there, those that are there stay. ``DRAINING``: ranks are leaving.
``DRAINED``: they have left, and the node may be taken away. ``DEAD``: the cluster has lost it."""


class NodeMark(Answer):
    """Why a node takes no new ranks."""

    reason: str | None
    """In words; evidence where the service cordoned the node by itself."""
    by: str
    """Name of the token that asked for it; ``everstep`` is the service itself."""
    at: Time
    deadline: Time | None
    """When a draining node is to be taken away; null where nobody said."""


class Node(Answer):
    id: str
    hostname: str
    ip: str
    state: NodeState
    is_head: bool
    mark: NodeMark | None = None
    """Who cordoned or drained it, and why; null where nobody did, or where only Ray was told."""
    resources_total: dict[str, float]
    runs: tuple[str, ...]
    """Ids of the runs with ranks on it."""


class ClusterInfo(Answer):
    available: bool
    """Whether Ray answered; nodes are then current."""
    address: str | None
    dashboard_url: str | None
    ray_version: str | None
    nodes: tuple[Node, ...]


class Readiness(Answer):
    status: Literal["ready", "unavailable"]
    database: Literal["up", "down"]
    storage: Literal["up", "down"]
    ray: Literal["up", "down"]
    reconciler_lag_s: float | None
    """Seconds since the reconciler's last finished tick."""
