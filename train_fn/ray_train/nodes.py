"""Read the current state of the cluster's nodes, rather than the one that the GCS last recorded."""

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
"""``look_at_nodes`` with its arguments bound."""


def node_look(probe_timeout_s: float, storage: Storage) -> Look:
    """Return ``look_at_nodes`` with its own reader of the service's node marks."""
    return partial(look_at_nodes, probe_timeout_s, MarksReader(storage))


def head_node_ids() -> set[str]:
    """Return the head's node id; an empty set if the GCS knows no live head. Raise Ray's error if
    the GCS does not answer."""
    return {
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and _HEAD_RESOURCE in node["Resources"]
    }


def look_at_nodes(probe_timeout_s: float, reader: MarksReader) -> tuple[NodeView, ...]:
    """Return every node that the GCS considers alive, with whether its raylet accepts a connection
    now, and the node's mark.

    Ray or the service can drain a node. Only the service can cordon one. Raise Ray's error if the
    GCS does not answer.
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
    """Return the earlier drain deadline of Ray (0 for none) and the service, as Unix time in
    seconds; None if there is none."""
    said = [ray_deadline, mark.deadline if mark is not None and mark.state == "draining" else None]
    return min((deadline for deadline in said if deadline), default=None)
