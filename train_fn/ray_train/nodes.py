"""A look at the cluster's nodes as they are now, not as the GCS last heard of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import ray

from storage.cluster.node_marks import NodeMark
from storage.filesystem import Storage
from train_fn.node.probe import ask
from train_fn.ray_train.ray_internals import cluster_state
from train_fn.recovery.marks import MarksReader
from train_fn.recovery.sizing import NodeView

_HEAD_RESOURCE = "node:__internal_head__"

Look = Callable[[], tuple[NodeView, ...]]
"""``look_at_nodes`` as one process uses it."""


def node_look(probe_timeout_s: float, storage: Storage) -> Look:
    """``look_at_nodes`` with a reader of the service's marks of its own."""
    return partial(look_at_nodes, probe_timeout_s, MarksReader(storage))


def head_node_ids() -> set[str]:
    """The head's node id; none where the GCS knows of no living head. Raises what Ray raises where
    the GCS does not answer."""
    return {
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and _HEAD_RESOURCE in node["Resources"]
    }


def look_at_nodes(probe_timeout_s: float, reader: MarksReader) -> tuple[NodeView, ...]:
    """Every node that the GCS believes alive, with whether its raylet accepts a connection right
    now, and how it is marked.

    A node drains by Ray's word or by the service's; a cordon is the service's alone.

    Raises what Ray raises where the GCS itself does not answer.
    """
    reader.ask()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    available = cluster_state.available_resources_per_node()
    draining = cluster_state.get_draining_nodes() or {}
    answers = ask([(n["NodeManagerAddress"], n["NodeManagerPort"]) for n in nodes], probe_timeout_s)
    marks = reader.marks()
    marked = {node_id: mark.state for node_id, mark in marks.items()}
    return tuple(
        NodeView(
            node_id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            port=node["NodeManagerPort"],
            total=node["Resources"],
            available=available.get(node["NodeID"], {}),
            is_head=_HEAD_RESOURCE in node["Resources"],
            reachable=answer is True,
            silent=answer is None,
            draining=node["NodeID"] in draining or marked.get(node["NodeID"]) == "draining",
            drain_deadline=_earliest(
                draining.get(node["NodeID"], 0) / 1000, marks.get(node["NodeID"])
            ),
            cordoned=marked.get(node["NodeID"]) == "cordoned",
        )
        for node, answer in zip(nodes, answers, strict=True)
    )


def _earliest(ray_deadline: float, mark: NodeMark | None) -> float | None:
    """When a node is to be taken away, by Ray's word (0 for none) and by the service's; unix
    seconds."""
    said = [ray_deadline, mark.deadline if mark is not None and mark.state == "draining" else None]
    return min((deadline for deadline in said if deadline), default=None)
