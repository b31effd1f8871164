"""The end of a group of ranks: release the survivors, keep their processes and states, and
report on each rank. Here it is decided that a rank is dead, and nowhere else: ``with_error`` and
``GroupShutdown`` weigh the evidence, ``lost`` and ``gone`` write it down.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from train_fn.errors import RankDied
from train_fn.ray_train.group.node_checks import find_stopped, wake_stopped
from train_fn.ray_train.group.placement import Bundle
from train_fn.ray_train.ray_internals import (
    Worker,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from train_fn.ray_train.scaling import ReadNodes
from train_fn.ray_train.worker_actor import RankEnd
from train_fn.recovery.evidence import RankReport, describe_error
from train_fn.recovery.hang import (
    SILENT_S,
    find_silent,
    may_still_leave,
    silent_ranks,
    waits_for_others,
)
from train_fn.recovery.sizing import NodeView

logger = logging.getLogger(__name__)

_STRAGGLER_S = 2.0
"""Seconds that other survivors have once one has left its step. If longer, they have three times as
long as the first took."""
_SLOWEST_BYTES_PER_S = 300e6
"""Lowest assumed rate at which several ranks at once copy, digest and write a state."""
_KEPT_S = 2.0
"""Seconds that a rank whose state is already on its node has to be freed by an abort and exit."""
_WAIT_S = 0.5
"""Interval in seconds at which a rank that is waited for reports its state."""


def hold_for(hold_s: float, state_bytes: int) -> float:
    """Return how many seconds ranks may take to write states of ``state_bytes`` bytes."""
    return hold_s + state_bytes / _SLOWEST_BYTES_PER_S


def _has_left_a_state(report: RankReport) -> bool:
    in_snapshot = None if report.error is None else report.error.snapshot_step
    return any(step is not None for step in (report.kept_step, in_snapshot))


class GroupShutdown:
    """Find out how each rank of a failed group ended.

    Args:
        workers: the group's workers, by rank.
        read_nodes: returns the current nodes of the cluster.
        errors: the error of each rank's last poll, by rank.
        silent_s: seconds without an answer after which a rank counts as stopped.
        end: ends a rank, given its actor.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        read_nodes: ReadNodes,
        errors: Mapping[int, BaseException | None],
        silent_s: float = SILENT_S,
        end: Callable[[Any], object] = ray.kill,
    ) -> None:
        self._silent_s, self._end = silent_s, end
        self._workers = workers
        self._read_nodes = read_nodes
        self._reports: dict[int, RankReport] = {}
        self._waiting: dict[Any, int] = {}
        """The rank for each pending call, which returns when the rank has ended."""
        self._began = time.monotonic()
        self._asked_at: dict[int, float] = {}
        """When each rank was last polled."""
        self._have_woken = False
        nodes = {node.node_id: node for node in read_nodes()}
        for rank, worker in enumerate(workers):
            report = dataclasses.replace(place_of(rank, worker, nodes), still_running=True)
            if not report.node_alive:
                report = lost(report)
            self._reports[rank] = report = with_error(report, errors.get(rank))
            if report.unresponsive:
                # Its peers wait for it in collectives, and would wait forever.
                end(worker.actor)
            elif report.node_alive and not report.died:
                worker.actor.abandon.remote()
                self._wait_for(rank)

    def reports_within(
        self, hold_s: float, patience_s: Callable[[], float] = lambda: 0.0
    ) -> tuple[RankReport, ...]:
        """Return how the ranks ended, after at most this wait. A rank that takes longer stays
        ``still_running``. Nodes that do not answer are not waited for.

        Args:
            hold_s: longest wait in seconds, but for larger states.
            patience_s: returns how much longer ranks may take for what they do. While nobody has
                left a state, one that is busy with its step is waited for as long.
        """
        deadline = float("inf")
        stacks: dict[int, str | None] = {}
        while self._waiting and (
            (left_s := self._until(deadline, hold_s) - time.monotonic()) > 0
            or (left_s := self._patience_for_the_last(stacks, patience_s)) > 0
        ):
            done = self._answered(min(left_s, 0.25))
            if not done:
                self._drop_lost_nodes()  # may take a second, in which ranks answer
                done = self._answered(0.0)
            for ref in done:
                rank = self._waiting.pop(ref)
                self._reports[rank], stacks[rank] = with_end(self._reports[rank], ref)
                if self._reports[rank].still_running:
                    self._wait_for(rank)
                elif not self._reports[rank].died:
                    deadline = min(
                        deadline,
                        time.monotonic() + max(_STRAGGLER_S, 3 * (time.monotonic() - self._began)),
                    )
            waiting, now = set(self._waiting.values()), time.monotonic()
            if waiting and all(self._reports[rank].kept_step is not None for rank in waiting):
                deadline = min(deadline, now + _KEPT_S)
            silent = find_silent(self._asked_at, stacks, waiting, now, self._silent_s)
            if silent:
                self._kill_silent(silent)
                deadline = time.monotonic() + 2 * _STRAGGLER_S
            elif (
                waiting
                and not self._have_woken
                and len(silent_ranks(self._asked_at, waiting, now, self._silent_s)) == len(waiting)
            ):
                self._wake()
        for rank in self._waiting.values():
            report = self._reports[rank]
            held_up = report.kept_step is not None or waits_for_others(stacks.get(rank) or "")
            self._reports[rank] = dataclasses.replace(report, held_up=held_up)
        return tuple(self._reports[rank] for rank in sorted(self._reports))

    def _until(self, deadline: float, hold_s: float) -> float:
        """Return the latest end of the wait. Larger states get more time."""
        largest = max((report.state_bytes for report in self._reports.values()), default=0)
        return min(deadline, self._began + hold_for(hold_s, largest))

    def _patience_for_the_last(
        self, stacks: Mapping[int, str | None], patience_s: Callable[[], float]
    ) -> float:
        """Return how many seconds more are waited for ranks that may still leave, if nobody has
        left a state. It would be lost with them."""
        if any(map(_has_left_a_state, self._reports.values())):
            return 0.0
        waiting = set(self._waiting.values())
        silent = silent_ranks(self._asked_at, waiting, time.monotonic(), self._silent_s)
        return patience_s() if may_still_leave(stacks, waiting - set(silent)) else 0.0

    def _answered(self, within_s: float) -> list[Any]:
        """Wait until one call returns, then return all that have. A rank whose answer has arrived
        must not count as silent."""
        if not self._waiting:
            return []
        first, _ = ray.wait(list(self._waiting), num_returns=1, timeout=within_s)
        if not first:
            return []
        done, _ = ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=0)
        return list(done)

    def _wait_for(self, rank: int) -> None:
        self._asked_at[rank] = time.monotonic()
        self._waiting[self._workers[rank].actor.wait_for_end.remote(_WAIT_S)] = rank

    def _wake(self) -> None:
        """Continue stopped ranks if no remaining rank answers, since none then keeps a state for
        the others. The woken ranks find their peers gone, and write their own states."""
        self._have_woken = True
        left = [self._reports[rank] for rank in self._waiting.values()]
        woken = wake_stopped((report.node_id, report.pid) for report in left)
        if woken:
            logger.warning(
                "no rank answered because processes %s were stopped; continuing them",
                sorted(pid for _, pid in woken),
            )

    def _kill_silent(self, silent: Collection[int]) -> None:
        """Kill ranks that do not answer while others wait for them. This frees the others, which
        then write their states."""
        logger.warning(
            "ranks %s do not answer, and others wait for them in collectives; killing them",
            sorted(silent),
        )
        for ref, rank in list(self._waiting.items()):
            if rank in silent:
                del self._waiting[ref]
                self._reports[rank] = dataclasses.replace(
                    self._reports[rank], unresponsive=True, still_running=False
                )
                self._end(self._workers[rank].actor)

    def _drop_lost_nodes(self) -> None:
        reachable = {node.node_id for node in self._read_nodes() if node.reachable}
        for ref, rank in list(self._waiting.items()):
            if self._reports[rank].node_id not in reachable:
                del self._waiting[ref]
                self._reports[rank] = lost(self._reports[rank])


# ---------------------------------------------------------------- hosts

# The hosts that outlive an attempt, kept for the next one.


def end_rank(actor: Any) -> None:
    """End the rank of a host at once. The host goes on."""
    actor.end_rank.remote()


@dataclass(frozen=True)
class Host:
    """The actor of a rank that can serve another attempt."""

    actor: Any
    bundle: Bundle
    pid: int
    step: float = -1
    """Step of the state that its rank has left on the node; -1 for none."""


class Hosts:
    """Hosts between two attempts of one run."""

    def __init__(self) -> None:
        self._held: list[Host] = []

    def hold(self, hosts: Sequence[Host]) -> None:
        """Hold hosts for the next attempt."""
        self._held += hosts

    def take(self) -> list[Host]:
        """Return the hosts that are held. They are no longer held then."""
        taken, self._held = self._held, []
        return taken

    def end(self) -> None:
        """End the hosts that are held, since no attempt follows that could use them."""
        for one in self.take():
            ray.kill(one.actor)


# ---------------------------------------------------------------- rank reports

# Build a report on each rank of a group from its node, the errors of its polls, and its end. A rank
# is dead if its node is lost, or if its host or Ray says that its process is gone. One that does
# not answer is not: it may be stopped, and hold its peers up.

_PING_S = 1.0
"""Timeout in seconds for a rank's process to answer that it is alive. Most do at once, also while
they wait for a peer that died."""


def lost(report: RankReport) -> RankReport:
    """Return the report on a rank whose node is lost. What it did there is not known any more."""
    return dataclasses.replace(
        report,
        node_alive=False,
        died=True,
        death=None,
        unresponsive=False,
        still_running=False,
    )


def gone(report: RankReport, death: str) -> RankReport:
    """Return the report on a rank whose process is gone. ``death`` describes how it ended."""
    return dataclasses.replace(report, died=True, death=death, still_running=False)


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
    if isinstance(error, RankDied):
        return gone(report, str(error))
    if isinstance(error, WorkerHealthCheckTimeoutError | ActorUnavailableError):
        if not report.node_alive:
            return lost(report)
        return dataclasses.replace(report, unresponsive=True, still_running=False)
    if isinstance(error, RayActorError):
        return gone(dataclasses.replace(report, preempted=bool(error.preempted)), str(error))
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
    ranks are stopped."""
    try:
        nodes = {node.node_id: node for node in read_nodes()}
        reports = [place_of(rank, worker, nodes) for rank, worker in enumerate(workers)]
        places = [(report.node_id, report.pid) for report in reports]
        stopped = find_stopped(places)
    except Exception as exc:  # the ranks are killed in any case
        logger.warning("could not find out which ranks hold up the start: %s", exc)
        return ()
    return tuple(
        dataclasses.replace(
            report, unresponsive=place in stopped, still_running=place not in stopped
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
    pings = [worker.actor.ping_rank.remote() for worker in workers]
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
    except RayError as exc:
        return with_error(report, exc)
    return report
