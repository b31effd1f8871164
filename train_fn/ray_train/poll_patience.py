"""Wait for ranks that missed a poll while the network may be at fault, and ask the nodes of those
that do not answer whether they are there.

Ray counts a rank as lost after its first failed call, but does not notice that its process is gone
while something else holds its connections.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError

from train_fn.ray_train.nodes import ReadNodes
from train_fn.ray_train.rank_reports import UNNOTICED
from train_fn.ray_train.ray_internals import (
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from train_fn.ray_train.stopped_processes import find_gone
from train_fn.recovery.sizing import NodeView

_SILENT_S = 2.0
"""Seconds without an answer after which a rank's node is asked whether its process is there."""
_ASK_AGAIN_S = 5.0
_NODE_ANSWERS_S = 3.0

logger = logging.getLogger(__name__)


class PollPatience:
    """Decide which ranks of one group still count as running after a missed poll.

    Args:
        read_nodes: returns the current nodes of the cluster.
        health_timeout_s: how long a rank may miss polls while its node answers.
    """

    def __init__(self, read_nodes: ReadNodes, health_timeout_s: float) -> None:
        self._read_nodes = read_nodes
        self._health_timeout_s = health_timeout_s
        self._missed_since: dict[int, float] = {}
        """Since when each rank could not be called, in monotonic seconds."""
        self._logged_cut_off = False
        self._asked_nodes_at = float("-inf")

    def still_running(
        self,
        statuses: Sequence[Any],
        workers: Sequence[Any],
        pending_polls: MutableMapping[int, Any],
    ) -> set[int]:
        """Return the ranks that missed a poll and still count as running.

        A rank is called again for ``health_timeout_s`` if its node answers. If no other host
        answers, this one is cut off: the ranks train on without it, and none counts as lost.

        Args:
            statuses: the result of a poll, by rank.
            workers: the group's workers, by rank.
            pending_polls: Ray's polls without a result, by rank. Cleared if this host is cut off,
                so that the next poll is a new one with its own timeout.
        """
        missed = {rank for rank, status in enumerate(statuses) if _is_missed(status.error)}
        self._missed_since = {
            rank: self._missed_since.get(rank, time.monotonic()) for rank in missed
        }
        if not missed:
            return set()
        try:
            nodes = {node.node_id: node for node in self._read_nodes()}
        except Exception as exc:
            logger.warning("the cluster's nodes could not be read: %s", exc)
            return set()
        if self._is_cut_off(nodes.values(), workers):
            pending_polls.clear()
            self._missed_since.clear()
            return missed
        recent = time.monotonic() - self._health_timeout_s
        return {
            rank
            for rank in missed
            if _may_answer_yet(workers[rank], nodes)
            and rank not in pending_polls  # a call that hangs had its time already
            and self._missed_since[rank] > recent
        }

    def gone(self, workers: Sequence[Any], pending_polls: Mapping[int, Any]) -> dict[int, Any]:
        """Return the ranks whose process is gone though Ray has not noticed, each with the error of
        its poll. Their nodes are asked once they have not answered for a while.

        Args:
            workers: the group's workers, by rank.
            pending_polls: Ray's polls without a result, by rank.
        """
        now = time.monotonic()
        silent = {
            rank: (workers[rank].metadata.node_id, workers[rank].metadata.pid)
            for rank, poll in pending_polls.items()
            if now - poll.start_time > _SILENT_S
        }
        if not silent or now - self._asked_nodes_at < _ASK_AGAIN_S:
            return {}
        self._asked_nodes_at = now
        try:
            reachable = {node.node_id for node in self._read_nodes() if node.reachable}
        except Exception as exc:
            logger.warning("the cluster's nodes could not be read: %s", exc)
            return {}
        asked = [place for place in silent.values() if place[0] in reachable]
        found = find_gone(asked, _NODE_ANSWERS_S)
        return {
            rank: WorkerHealthCheckFailedError(UNNOTICED, failure=RayActorError(None, UNNOTICED))
            for rank, place in silent.items()
            if place in found
        }

    def is_cut_off(self, workers: Sequence[Any]) -> bool:
        """Return whether this host is cut off: the GCS counts other hosts as alive, but none of
        them answers."""
        try:
            return self._is_cut_off(self._read_nodes(), workers)
        except Exception as exc:
            logger.warning("the cluster's nodes could not be read: %s", exc)
            return False

    def _is_cut_off(self, nodes: Iterable[NodeView], workers: Sequence[Any]) -> bool:
        others = [node for node in nodes if not node.is_head]
        ranks_on = {worker.metadata.node_id for worker in workers}
        cut_off = (
            bool(others)
            and all(node.silent for node in others)
            and ranks_on <= {node.node_id for node in others}
        )
        if cut_off and not self._logged_cut_off:
            logger.warning("no other host answers; leaving the ranks alone until one does")
        self._logged_cut_off = cut_off
        return cut_off


def _may_answer_yet(worker: Any, nodes: Mapping[str, NodeView]) -> bool:
    """Return whether the node of a rank that could not be called answers itself."""
    node = nodes.get(worker.metadata.node_id)
    return node is not None and node.reachable


def _is_missed(error: Any) -> bool:
    """Return whether an error of a poll says that the rank could not be called or did not answer.
    It does not if the rank is dead."""
    if isinstance(error, WorkerHealthCheckFailedError):
        return isinstance(error.health_check_failure, ActorUnavailableError)
    return isinstance(error, WorkerHealthCheckTimeoutError)
