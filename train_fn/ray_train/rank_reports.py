"""Build a report on each rank of a group from its node, the errors of its polls, and its end."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from train_fn.ray_train.nodes import ReadNodes
from train_fn.ray_train.ray_internals import (
    Worker,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from train_fn.ray_train.stopped_processes import find_gone, find_stopped
from train_fn.ray_train.worker_actor import RankEnd
from train_fn.recovery.evidence import RankReport
from train_fn.recovery.rank_error import describe_error
from train_fn.recovery.sizing import NodeView

logger = logging.getLogger(__name__)

UNNOTICED = (
    "its process is gone, though Ray has not noticed: something that it has started holds its "
    "connections"
)
"""The description of a death that only the rank's node knows of."""
_PING_S = 1.0
"""Timeout in seconds for a rank's process to answer that it is alive. Most do at once, also while
they wait for a peer that died."""


def place_of(rank: int, worker: Worker, nodes: Mapping[str, NodeView]) -> RankReport:
    """Return a report on a rank from its node alone. A node that the cluster no longer lists is not
    alive."""
    node = nodes.get(worker.metadata.node_id)
    return RankReport(
        rank=rank,
        node_id=worker.metadata.node_id,
        pid=worker.metadata.pid,
        node_alive=node is not None and node.reachable,
        node_draining=node is not None and node.draining,
    )


def with_end(report: RankReport, ref: Any) -> tuple[RankReport, str | None]:
    """Return ``report`` with the end of its rank, and the rank's stack if it has not ended."""
    try:
        end: RankEnd = ray.get(ref)
    except Exception as exc:
        return with_error(report, exc), None
    if end.error is not None:
        report = with_error(report, end.error)
    report = dataclasses.replace(
        report,
        still_running=not end.ended,
        kept_step=end.kept_step,
        state_bytes=end.state_bytes,
        stays_at=end.stays_at,
    )
    return report, end.stack


def with_error(report: RankReport, error: BaseException | None) -> RankReport:
    """Return ``report`` with the facts in an error from a poll or a call to its rank."""
    if isinstance(error, WorkerHealthCheckFailedError):
        error = error.health_check_failure
    error = getattr(error, "_base_exc", error)
    if isinstance(error, RayTaskError):
        error = error.cause
    if error is None:
        return report
    if isinstance(error, WorkerHealthCheckTimeoutError | ActorUnavailableError):
        return dataclasses.replace(
            report, unresponsive=report.node_alive, died=not report.node_alive, still_running=False
        )
    if isinstance(error, RayActorError):
        return dataclasses.replace(
            report,
            died=True,
            death=str(error),
            preempted=bool(error.preempted),
            still_running=False,
        )
    return dataclasses.replace(report, error=describe_error(error, report.rank))


def with_unheard(reports: Sequence[RankReport], ips: Mapping[str, str]) -> tuple[RankReport, ...]:
    """Return the reports with the nodes that each rank's host did not hear.

    Args:
        ips: the address of each node of the group, by its id. An address of several nodes says
            nothing about one of them.
    """
    named = Counter(ips.values())
    nodes = {ip: node_id for node_id, ip in ips.items() if named[ip] == 1}
    return tuple(
        dataclasses.replace(
            report, unheard=tuple(nodes[ip] for ip in report.error.unheard if ip in nodes)
        )
        if report.error is not None
        else report
        for report in reports
    )


def reports_of_slow_start(
    workers: Sequence[Worker], read_nodes: ReadNodes
) -> tuple[RankReport, ...]:
    """Return reports on the known ranks of a group whose start does not progress. They say which
    ranks are stopped or gone."""
    try:
        nodes = {node.node_id: node for node in read_nodes()}
        reports = [place_of(rank, worker, nodes) for rank, worker in enumerate(workers)]
        places = [(report.node_id, report.pid) for report in reports]
        stopped, gone = find_stopped(places), find_gone(places)
    except Exception as exc:  # the ranks are killed in any case
        logger.warning("could not find out which ranks hold up the start: %s", exc)
        return ()
    return tuple(
        dataclasses.replace(
            report,
            unresponsive=place in stopped,
            died=place in gone,
            death=UNNOTICED if place in gone else None,
            still_running=place not in stopped | gone,
        )
        for report, place in zip(reports, places, strict=True)
    )


def reports_after_failed_start(
    workers: Sequence[Worker], read_nodes: ReadNodes
) -> tuple[RankReport, ...]:
    """Return reports on the known ranks of a group whose start failed. They say whose node is gone
    and whose process died."""
    if not workers:
        return ()
    # a call that no other call of the start delays
    pings = [worker.actor.kept_state.remote() for worker in workers]
    ready, _ = ray.wait(pings, num_returns=len(pings), timeout=_PING_S)
    nodes = {node.node_id: node for node in read_nodes()}
    reports = [place_of(rank, worker, nodes) for rank, worker in enumerate(workers)]
    return tuple(
        _with_answer(report, ping) if ping in ready else report
        for report, ping in zip(reports, pings, strict=True)
    )


def _with_answer(report: RankReport, ping: Any) -> RankReport:
    """Return ``report`` with the result of an answered call to its rank's process."""
    try:
        ray.get(ping)
    except RayActorError as exc:
        return with_error(report, exc)
    return report
