"""What is known of each rank of a group, put together from where it ran, what its polls said, and how it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from train_fn.rank_error import RankFailure, describe_error
from train_fn.ray_train.seam import Worker, WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError
from train_fn.ray_train.worker_actor import RankEnd
from train_fn.recovery.sizing import NodeView
from train_fn.verdict import RankReport


def place_of(rank: int, worker: Worker, nodes: Mapping[str, NodeView]) -> RankReport:
    """What is known of a rank from where it ran; a node that the cluster no longer names is not alive."""
    node = nodes.get(worker.metadata.node_id)
    return RankReport(
        rank=rank,
        node_id=worker.metadata.node_id,
        pid=worker.metadata.pid,
        node_alive=node is not None and node.reachable,
        node_draining=node is not None and node.draining,
    )


def with_end(report: RankReport, ref: Any) -> tuple[RankReport, str | None]:
    """``report`` with how its rank ended, and the stack of one that has not."""
    try:
        end: RankEnd = ray.get(ref)
    except Exception as exc:
        return with_error(report, exc), None
    if end.error is not None:
        report = with_error(report, end.error)
    return dataclasses.replace(report, still_running=not end.ended), end.stack


def with_error(report: RankReport, error: BaseException | None) -> RankReport:
    """``report`` with what an error, as polled or as raised by a call, says of its rank."""
    if isinstance(error, WorkerHealthCheckFailedError):
        error = error.health_check_failure
    error = getattr(error, "_base_exc", error)
    if error is None:
        return report
    if isinstance(error, WorkerHealthCheckTimeoutError | ActorUnavailableError):
        return dataclasses.replace(report, unresponsive=report.node_alive, died=not report.node_alive, still_running=False)
    if isinstance(error, RayActorError):
        return dataclasses.replace(report, died=True, death=str(error), preempted=bool(error.preempted), still_running=False)
    if isinstance(error, RankFailure):
        return dataclasses.replace(report, error=error.error)
    return dataclasses.replace(report, error=describe_error(error, report.rank))


def with_answer(report: RankReport, ping: Any) -> RankReport:
    """``report`` with what a call that was answered says of its rank's process."""
    try:
        ray.get(ping)
    except RayActorError as exc:
        return with_error(report, exc)
    return report
