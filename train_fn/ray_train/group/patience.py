"""How long a group waits: for ranks that missed a poll, for a start that takes too long, for
ranks that hold up the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from everstep.wire.events import EventKind
from train_fn.ray_train.attempt_log import AttemptLog
from train_fn.ray_train.group.end import lost
from train_fn.ray_train.ray_internals import (
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from train_fn.ray_train.scaling import ReadNodes
from train_fn.recovery import error_text
from train_fn.recovery.evidence import RankReport
from train_fn.recovery.hang import (
    SILENT_S,
    TRAINING_THREAD,
    find_late,
    find_stuck,
    is_known_who_hangs,
)
from train_fn.recovery.sizing import NodeView

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


# ---------------------------------------------------------------- start watch

# Give up the start of a group that takes too long, or in which a rank is stopped.

_LOOK_S = 10.0
"""Interval in seconds between two checks for stopped ranks."""


Reports = tuple[RankReport, ...]


class StartLimit:
    """When a start has to end. It may be moved back while the start is watched."""

    def __init__(self, limit_s: float) -> None:
        self._at = time.monotonic() + limit_s
        self.changed = threading.Event()
        """Set when the limit has moved, and when the start has ended."""
        self.ended = False

    def add(self, seconds: float) -> None:
        """Let the start take so many seconds more."""
        self._at += seconds
        self.changed.set()

    def left_s(self) -> float:
        """Return the seconds that are left; 0 once the start is overdue."""
        return max(0.0, self._at - time.monotonic())


@contextlib.contextmanager
def watched_start(
    limit_s: float, find_stopped: Callable[[], Reports], give_up: Callable[[Reports], None]
) -> Iterator[StartLimit]:
    """Watch the start that runs in this context, from a thread.

    Which ranks answer does not show which one holds up the others, since all wait for each other.
    Their nodes know which are stopped.

    Args:
        limit_s: longest start in seconds.
        find_stopped: returns a report on each rank; stopped ones are ``unresponsive``.
        give_up: called with these reports. It must kill the group's actors, so that the start fails
            at once.
    """
    limit = StartLimit(limit_s)

    def watch() -> None:
        while not limit.ended:
            if limit.changed.wait(min(_LOOK_S, limit.left_s())):
                limit.changed.clear()
                continue
            reports = find_stopped()
            overdue = limit.left_s() == 0.0
            if limit.ended or not (overdue or any(each.unresponsive for each in reports)):
                continue
            why = "takes too long to start" if overdue else "waits for a rank that is stopped"
            logger.warning("the worker group %s; killing its processes", why)
            give_up(reports)
            return

    threading.Thread(target=watch, name="start-watch", daemon=True).start()
    try:
        yield limit
    finally:
        limit.ended = True
        limit.changed.set()


# ---------------------------------------------------------------- hung ranks

# Kill the ranks that the others wait for, and explain in the reports why they died.

_LATE = (
    ". It did not enter the collective in which the other ranks wait, as torch's flight recorder "
    "shows"
)


class HungRanks:
    """The ranks of one group that were killed because they hung, with every rank's stack at that
    time.

    Args:
        health_timeout_s: how long a poll may take, for the report on a rank that does not answer.
    """

    def __init__(self, health_timeout_s: float) -> None:
        self._health_timeout_s = health_timeout_s
        self._stacks: dict[int, str | None] = {}
        self._late: list[int] = []
        """Ranks that did not enter the collective in which the others wait."""
        self._ranks: list[int] = []
        self._reason = ""

    def kill(self, workers: Sequence[Any], reason: str, end: Callable[[Any], object]) -> list[int]:
        """Read every rank's stack and counts of collectives, kill the ranks that hold up the
        others, and return them. If all stacks wait in a collective, the counts decide.

        Their peers then leave with a failed collective, as after any death. ``explain`` tells the
        difference.

        Args:
            workers: the group's workers, by rank.
            reason: why they are taken for hung.
            end: ends a rank, given its actor.
        """
        self._reason = reason
        self._stacks = answers([worker.actor.stack.remote() for worker in workers])
        is_known = is_known_who_hangs(self._stacks)
        self._late = (
            []
            if is_known
            else find_late(answers([worker.actor.collective_counts.remote() for worker in workers]))
        )
        self._ranks = self._late or find_stuck(self._stacks)
        for rank in self._ranks:
            end(workers[rank].actor)
        return self._ranks

    def explain(self, report: RankReport) -> RankReport:
        """Return ``report`` with the rank's stack, and with the hang as the cause if it was killed
        for one, or if it does not answer.

        If the node of a killed rank does not answer either, the node is lost: it is unknown whether
        the rank hung, or was killed at all.
        """
        report = dataclasses.replace(report, stack=self._stacks.get(report.rank))
        if report.rank in self._ranks and not report.node_alive:
            return lost(report)
        if report.rank in self._ranks:
            return dataclasses.replace(
                report,
                unresponsive=True,
                is_unproven=not (self._late or is_known_who_hangs(self._stacks)),
                died=False,  # by our own hand
                death=None,
                still_running=False,
                hang=self._reason + (_LATE if self._late else ""),
            )
        if report.unresponsive:
            no_answer = (
                "its process does not answer, though its node does: it was stopped, or is busy "
                f"outside of Python. A poll may take {self._health_timeout_s:g} s "
                "(EVERSTEP_RECOVERY_HEALTH_TIMEOUT_S, or recovery.hang_timeout_s if that is "
                "shorter). Increase that if it is busy"
            )
            return dataclasses.replace(report, hang=no_answer)
        return report


def answers(asked: Sequence[Any]) -> dict[int, Any]:
    """Return every rank's answer to the call made on it; None for a rank that does not answer."""
    ranks = {ref: rank for rank, ref in enumerate(asked)}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=SILENT_S)
    answers: dict[int, Any] = dict.fromkeys(ranks.values())
    for ref in answered:
        with contextlib.suppress(RayError):
            answers[ranks[ref]] = ray.get(ref)
    return answers


# ---------------------------------------------------------------- stack reports

# Report what the ranks of a running group do: when somebody asks, and by itself once nothing has
# moved for a while.


class StackReports:
    """Read every rank's stacks and write them to the journal.

    Args:
        after_s: seconds without progress after which it does so by itself; 0 for never.
    """

    def __init__(self, attempt_log: AttemptLog, after_s: float) -> None:
        self._log, self._after_s = attempt_log, after_s
        self._attempt = 0
        self._last_s: float | None = None
        """Seconds without progress at the newest report of this attempt that nobody asked for."""
        self._answered: str | None = None
        """Id of the newest request that was carried out."""

    def check(self, group: Any, quiet_s: float) -> None:
        """Report if somebody asks, or if nothing has moved for ``quiet_s`` seconds and that is
        longer than at the last report. Call this with every turn of the control loop."""
        if self._attempt != self._log.attempt:
            self._attempt, self._last_s = self._log.attempt, None
        order = self._log.journal.stacks_ordered
        if order is not None and order.id != self._answered:
            self._answered = order.id
            if order.attempt == self._attempt:
                self._report(group, quiet_s, order.id)
        # after twice as long each time, so that a run of long steps is asked seldom
        elif self._after_s and quiet_s >= (2 * self._last_s if self._last_s else self._after_s):
            self._last_s = quiet_s
            self._report(group, quiet_s, None)

    def _report(self, group: Any, quiet_s: float, order_id: str | None) -> None:
        workers = group.get_workers()
        stacks = answers([worker.actor.stack.remote() for worker in workers])
        node_ids = {rank: worker.metadata.node_id for rank, worker in enumerate(workers)}
        found = error_text.report(stacks, node_ids, TRAINING_THREAD)
        if order_id is None:
            logger.warning("nothing has moved for %.0f s: %s", quiet_s, found["summary"])
        facts = {"id": order_id, "quiet_s": round(quiet_s, 1), "step": self._log.journal.last_step}
        self._log.journal.emit(EventKind.STACKS, {**facts, **found})
