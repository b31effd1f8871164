"""Read the current state of the cluster's nodes, rather than the one that the GCS last recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial

import ray

from storage.cluster.node_marks import NodeMark
from storage.filesystem import Storage
from train_fn.node.probe import ask
from train_fn.ray_train.ray_internals import cluster_state
from train_fn.recovery.marks import MarksReader
from train_fn.recovery.partition import ExcludedNodes
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import NodeView

_HEAD_RESOURCE = "node:__internal_head__"

ReadNodes = Callable[[], tuple[NodeView, ...]]
"""``read_nodes`` with its arguments bound."""


def node_reader(probe_timeout_s: float, storage: Storage) -> ReadNodes:
    """Return ``read_nodes`` with its own reader of the service's node marks."""
    return partial(read_nodes, probe_timeout_s, MarksReader(storage))


def head_node_ids() -> set[str]:
    """Return the head's node id; an empty set if the GCS knows no live head. Raise Ray's error if
    the GCS does not answer."""
    return {
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and _HEAD_RESOURCE in node["Resources"]
    }


def read_nodes(probe_timeout_s: float, reader: MarksReader) -> tuple[NodeView, ...]:
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


class LiveNodes:
    """Read the nodes for one run's controller. Nodes that were excluded get no ranks for a
    while."""

    def __init__(self, settings: RecoverySettings, storage: Storage) -> None:
        self._settings = settings
        self._read = node_reader(settings.probe_timeout_s, storage)
        self._excluded = ExcludedNodes(settings.apart_s)
        self._last_read: tuple[float, tuple[NodeView, ...]] = (float("-inf"), ())

    def read(self) -> tuple[NodeView, ...]:
        """Return the nodes as they are now. Raise Ray's error if the GCS does not answer."""
        nodes = self._excluded.mark(self._read(), time.monotonic())
        self._last_read = time.monotonic(), nodes
        return nodes

    def recent(self) -> tuple[NodeView, ...]:
        """Return the nodes as last read, if that is recent: while ranks train, the scaling policy
        reads them every second."""
        read_at, nodes = self._last_read
        return (
            nodes
            if time.monotonic() - read_at < 2 * self._settings.resize_interval_s
            else self.read()
        )

    def exclude(self, node_ids: Collection[str]) -> None:
        """Exclude nodes for a while that others do not reach, or that are not fit."""
        self._excluded.exclude(node_ids, time.monotonic())
