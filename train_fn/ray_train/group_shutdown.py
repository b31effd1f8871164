"""Shut down a group that failed: release the survivors, and wait while they leave their step and
write their snapshots."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray

from train_fn.ray_train.nodes import ReadNodes
from train_fn.ray_train.rank_reports import UNNOTICED, place_of, with_end, with_error
from train_fn.ray_train.ray_internals import Worker
from train_fn.ray_train.stopped_processes import find_gone, wake_stopped
from train_fn.recovery.evidence import RankReport
from train_fn.recovery.hang import (
    SILENT_S,
    find_silent,
    may_still_leave,
    silent_ranks,
    waits_for_others,
)

logger = logging.getLogger(__name__)

_STRAGGLER_S = 2.0
"""Seconds that other survivors have once one has left its step. If longer, they have three times as
long as the first took."""
_SLOWEST_BYTES_PER_S = 300e6
"""Lowest assumed rate at which several ranks at once copy, digest and write a state."""
_KEPT_S = 2.0
"""Seconds that a rank whose state is already on its node has to be freed by an abort and exit."""
_NODES_ANSWER_S = 3.0
_WAIT_S = 0.5
"""Interval in seconds at which a rank that is waited for reports its state."""


def hold_for(hold_s: float, state_bytes: int) -> float:
    """Return how many seconds ranks may take to write states of ``state_bytes`` bytes."""
    return hold_s + state_bytes / _SLOWEST_BYTES_PER_S


def _has_left_a_state(report: RankReport) -> bool:
    in_snapshot = None if report.error is None else report.error.snapshot_step
    return any(step is not None for step in (report.stays_at, report.kept_step, in_snapshot))


class GroupShutdown:
    """Find out how each rank of a failed group ended.

    Args:
        workers: the group's workers, by rank.
        read_nodes: returns the current nodes of the cluster.
        errors: the error of each rank's last poll, by rank.
        silent_s: seconds without an answer after which a rank counts as stopped.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        read_nodes: ReadNodes,
        errors: Mapping[int, BaseException | None],
        silent_s: float = SILENT_S,
    ) -> None:
        self._silent_s = silent_s
        self._workers = workers
        self._read_nodes = read_nodes
        self._reports: dict[int, RankReport] = {}
        self._waiting: dict[Any, int] = {}
        """The rank for each pending call, which returns when the rank has ended."""
        self._began = time.monotonic()
        self._asked_at: dict[int, float] = {}
        """When each rank was last polled."""
        self._have_woken = False
        self._looked_for: set[int] = set()
        """Ranks that were looked for on their nodes."""
        nodes = {node.node_id: node for node in read_nodes()}
        for rank, worker in enumerate(workers):
            report = dataclasses.replace(place_of(rank, worker, nodes), still_running=True)
            if not report.node_alive:
                report = dataclasses.replace(report, died=True, still_running=False)
            self._reports[rank] = report = with_error(report, errors.get(rank))
            if report.unresponsive:
                # Its peers wait for it in collectives, and would wait forever.
                ray.kill(worker.actor)
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
            if self._drop_gone(silent_ranks(self._asked_at, waiting, now, self._silent_s)):
                continue
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
        self._drop_gone(list(self._waiting.values()))
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
                ray.kill(self._workers[rank].actor)

    def _drop_gone(self, ranks: Collection[int]) -> bool:
        """Look on their nodes for ranks that do not answer. Return whether the process of one is
        gone."""
        ranks = [rank for rank in ranks if rank not in self._looked_for]
        self._looked_for |= set(ranks)
        places = {(self._reports[rank].node_id, self._reports[rank].pid): rank for rank in ranks}
        found = {places[place] for place in find_gone(places, _NODES_ANSWER_S)} if ranks else set()
        for ref, rank in list(self._waiting.items()):
            if rank in found:
                del self._waiting[ref]
                self._reports[rank] = dataclasses.replace(
                    self._reports[rank], died=True, death=UNNOTICED, still_running=False
                )
                ray.kill(self._workers[rank].actor)
        return bool(found)

    def _drop_lost_nodes(self) -> None:
        reachable = {node.node_id for node in self._read_nodes() if node.reachable}
        for ref, rank in list(self._waiting.items()):
            if self._reports[rank].node_id not in reachable:
                del self._waiting[ref]
                self._reports[rank] = dataclasses.replace(
                    self._reports[rank], node_alive=False, died=True, still_running=False
                )
