"""Check versions, the network that the spec names, and connections between nodes before a group of
ranks trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import ray
from ray.exceptions import RayError

from everstep.wire import ErrorKind
from train_fn.node.versions import versions
from train_fn.ray_train.ray_internals import WorkerGroupStartupFailedError
from train_fn.ray_train.worker_actor import RankReady
from train_fn.recovery.evidence import RankReport
from train_fn.recovery.partition import nodes_to_exclude
from train_fn.recovery.rank_error import RankError
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import NodeView

ExcludeNodes = Callable[[list[str]], None]
"""Called with the ids of nodes that get no ranks for a while."""


class LinksBroken(WorkerGroupStartupFailedError):  # type: ignore[misc]
    """Nodes of a starting group cannot talk to each other.

    Args:
        message: for people.
        unheard: for each node, the nodes that it does not hear or reach.
    """

    def __init__(self, message: str, unheard: Mapping[str, Sequence[str]]) -> None:
        super().__init__(message)
        self.unheard = {node_id: tuple(others) for node_id, others in unheard.items() if others}


def link_reports(broken: LinksBroken, metas: Sequence[Any]) -> tuple[RankReport, ...]:
    """Return reports on the first rank of each node that say which nodes it does not hear."""
    return tuple(
        RankReport(number, node_id, metas[number].pid, unheard=broken.unheard.get(node_id, ()))
        for node_id, number in first_on_nodes(metas).items()
    )


def prepared(calls: Sequence[Any], settings: RecoverySettings, within_s: float = inf) -> list[Any]:
    """Return the answers of a starting group's processes. Raise WorkerGroupStartupFailedError if
    one does not answer in time, at most ``within_s`` seconds."""
    try:
        return list(ray.get(list(calls), timeout=min(within_s, settings.group_start_s)))
    except RayError as exc:
        raise WorkerGroupStartupFailedError(f"a rank's process did not start: {exc}") from exc


def first_on_nodes(metas: Sequence[Any]) -> dict[str, int]:
    """Return the number of the first rank's process on each node, by node id."""
    return {meta.node_id: number for number, meta in reversed(list(enumerate(metas)))}


def check_versions(ready: Sequence[RankReady], metas: Sequence[Any], exclude: ExcludeNodes) -> None:
    """Check that every node runs the versions of the driver's node. Raise
    WorkerGroupStartupFailedError if not, so that other nodes are tried next."""
    own = versions()
    others = {
        meta.node_id: rank.versions
        for rank, meta in zip(ready, metas, strict=True)
        if rank.versions != own
    }
    if others:
        exclude(list(others))
        found = "; ".join(f"node {node_id} runs {theirs}" for node_id, theirs in others.items())
        raise WorkerGroupStartupFailedError(
            f"{found}; the driver's node runs {own}. Install the same versions on every node"
        )


def network_reports(ready: Sequence[RankReady], metas: Sequence[Any]) -> tuple[RankReport, ...]:
    """Return reports on ranks whose node lacks the network that the spec names. The spec is wrong
    then, and this is reported before any rank waits."""
    reports = []
    for number, (rank, meta) in enumerate(zip(ready, metas, strict=True)):
        if rank.problem is not None:
            error = RankError(
                number, ErrorKind.USER, "NetworkSetting", rank.problem, "", 0, "start", time.time()
            )
            reports.append(RankReport(number, meta.node_id, meta.pid, error=error))
    return tuple(reports)


def check_reach(
    actors: Sequence[Any],
    metas: Sequence[Any],
    nodes: Mapping[str, NodeView],
    settings: RecoverySettings,
    exclude: ExcludeNodes,
) -> None:
    """Let every node try to connect to the others. Raise LinksBroken if some cannot reach each
    other."""
    first_on = {node_id: actors[number] for node_id, number in first_on_nodes(metas).items()}
    places = {
        node_id: (nodes[node_id].ip, nodes[node_id].port)
        for node_id in first_on
        if node_id in nodes
    }
    if len({ip for ip, _ in places.values()}) < 2:
        return
    tries = [
        first_on[node_id].reach.remote(list(places.values()), settings.probe_timeout_s)
        for node_id in places
    ]
    unreached = {
        node_id: [other for other, reached in zip(places, answer, strict=True) if not reached]
        for node_id, answer in zip(places, prepared(tries, settings), strict=True)
    }
    excluded = nodes_to_exclude(unreached)
    if excluded:
        exclude(excluded)
        broken = "; ".join(
            f"{node_id} does not reach {', '.join(others)}"
            for node_id, others in unreached.items()
            if others
        )
        raise LinksBroken(
            f"nodes do not reach each other ({broken}); excluded for now: {', '.join(excluded)}",
            unreached,
        )
