"""Cause the faults of drills on a Ray cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, TaskUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from train_fn.drills.node_faults import kill_ranks, kill_raylet, signal_ranks
from train_fn.drills.orders import DrillRefused
from train_fn.ray_train.nodes import head_node_ids
from train_fn.ray_train.ray_internals import GcsClient, autoscaler_pb2
from train_fn.recovery.history import RankPlace

_ON_NODE_S = 30.0
"""Timeout in seconds for a node to start a process and cause a drill's fault there."""

NodeCall = tuple[str, Callable[..., str | None], tuple[Any, ...]]
"""Node id, a function that returns a problem or None, its arguments."""


class RayFaults:
    """Implement ``train_fn.drills.orders.Faults`` for the cluster that this driver is connected
    to."""

    def head_node_ids(self) -> Collection[str]:
        try:
            return head_node_ids()
        except RayError as exc:
            raise DrillRefused(f"the cluster's nodes could not be read: {exc}") from exc

    def signal(self, ranks: Sequence[RankPlace], signal_number: int) -> None:
        _on_nodes(
            [
                (node_id, signal_ranks, (node_id, pids, int(signal_number)))
                for node_id, pids in _by_node(ranks).items()
            ]
        )

    def kill_without_trace(self, ranks: Sequence[RankPlace], run_id: str) -> None:
        _on_nodes(
            [
                (node_id, kill_ranks, (run_id, node_id, pids))
                for node_id, pids in _by_node(ranks).items()
            ]
        )

    def kill_node(self, node_id: str) -> None:
        _on_nodes([(node_id, kill_raylet, (node_id,))], ends_node=True)

    def drain_node(self, node_id: str, deadline_s: float) -> None:
        """Drain a node like ``ray drain-node``. The reason is preemption, which Ray cannot
        refuse."""
        reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        deadline_ms = int((time.time() + deadline_s) * 1000)
        try:
            client = GcsClient(address=ray.get_runtime_context().gcs_address)
            accepted, problem = client.drain_node(
                node_id, reason, "an Everstep drill", deadline_ms, timeout=_ON_NODE_S
            )
        except (RayError, RuntimeError) as exc:
            raise DrillRefused(f"the request to drain node {node_id} failed: {exc}") from exc
        if not accepted:
            raise DrillRefused(f"Ray refuses to drain node {node_id}: {problem}")

    def kill_driver(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def _by_node(ranks: Sequence[RankPlace]) -> dict[str, tuple[int, ...]]:
    """Return the process ids of ranks by node id."""
    nodes = dict.fromkeys(place.node_id for place in ranks)
    return {
        node_id: tuple(place.pid for place in ranks if place.node_id == node_id)
        for node_id in nodes
    }


def _on_nodes(calls: Sequence[NodeCall], *, ends_node: bool = False) -> None:
    """Call functions on nodes in parallel, each in its own process there. Raise DrillRefused with
    the first problem.

    With ``ends_node`` a function also ends its own process, so that no answer comes.
    """
    refs = []
    for node_id, function, arguments in calls:
        # A task, not an actor: it uses one of the node's worker processes and returns it.
        task = ray.remote(num_cpus=0, max_retries=0)(function)
        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        refs.append(task.options(scheduling_strategy=where).remote(*arguments))
    for ref in refs:
        try:
            problem = ray.get(ref, timeout=_ON_NODE_S)
        except RayError as exc:
            if ends_node and not isinstance(exc, RayTaskError | TaskUnschedulableError):
                return
            raise DrillRefused(f"a node could not carry out the drill: {exc}") from exc
        if problem is not None:
            raise DrillRefused(problem)
