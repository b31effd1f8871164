"""A look at the cluster's nodes as they are now, not as the GCS last heard of them."""

from __future__ import annotations

import ray

from train_fn.ray_train.seam import cluster_state
from train_fn.recovery.probe import accepts_connection
from train_fn.recovery.sizing import NodeView

_HEAD_RESOURCE = "node:__internal_head__"


def look_at_nodes(probe_timeout_s: float) -> tuple[NodeView, ...]:
    """Every node that the GCS believes alive, with whether its raylet accepts a connection right now.

    Raises what Ray raises where the GCS itself does not answer.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    available = cluster_state.available_resources_per_node()
    draining = cluster_state.get_draining_nodes() or {}
    reachable = accepts_connection([(n["NodeManagerAddress"], n["NodeManagerPort"]) for n in nodes], probe_timeout_s)
    return tuple(
        NodeView(
            node_id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            port=node["NodeManagerPort"],
            total=node["Resources"],
            available=available.get(node["NodeID"], {}),
            is_head=_HEAD_RESOURCE in node["Resources"],
            reachable=up,
            draining=node["NodeID"] in draining,
        )
        for node, up in zip(nodes, reachable, strict=True)
    )
