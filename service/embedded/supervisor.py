"""The supervisor of the embedded cluster: it restarts a cluster that lost its head or keeper."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import structlog

from service.cluster.cluster_view import ClusterNote
from service.cluster.ray_jobs import RayEndpoint
from service.embedded.cluster import ClusterError, EmbeddedCluster

WATCH_INTERVAL_S: Final = 1.0
FIRST_RETRY_S: Final = 2.0
LONGEST_RETRY_S: Final = 60.0

log = structlog.get_logger(__name__)


class ClusterSupervisor:
    """Watches one embedded cluster and knows its current dashboard."""

    def __init__(self, cluster: EmbeddedCluster) -> None:
        self._cluster = cluster
        self._token = cluster.token()
        self._note: ClusterNote | None = None

    def start(self) -> None:
        """Adopt or start the cluster, and wait until it is ready. Raises ClusterError."""
        self._note = self._cluster.ensure_running()

    async def _start_unless(self, stopping: asyncio.Event) -> None:
        """Start the cluster as ``start`` does. Raises ClusterError if it does not start, or if the
        service is asked to stop before."""
        starting = asyncio.create_task(asyncio.to_thread(self.start))
        ending = asyncio.create_task(stopping.wait())
        await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            self._cluster.give_up()
        ending.cancel()
        await starting

    def note(self) -> ClusterNote | None:
        """Return the keeper's newest note, or None while there is no cluster."""
        return self._cluster.note() if self._note is not None else None

    def endpoint(self) -> RayEndpoint | None:
        """Return the cluster's dashboard, or None while there is none."""
        if self._note is None or self._note.dashboard_url is None:
            return None
        return RayEndpoint(self._note.dashboard_url, self._token)

    def _log_changes(self) -> None:
        """Log which nodes died or came back since the last call."""
        note = self.note()
        if note is None or self._note is None:
            return
        before = {node.slot: node.node_id for node in self._note.nodes}
        after = {node.slot: node.node_id for node in note.nodes}
        for slot in before.keys() - after.keys():
            log.warning(
                "a node of the embedded cluster died",
                node=before[slot],
                next_start=", ".join(
                    datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
                    for at in note.coming_back
                )
                or "never",
            )
        for slot, node_id in after.items():
            if before.get(slot) != node_id:
                log.info("a node of the embedded cluster is up", node=node_id, slot=slot)
        self._note = note

    async def run(self, stopping: asyncio.Event, on_ready: Callable[[int], None]) -> None:
        """Wait until the cluster is ready. Then check it every second until ``stopping``, and
        restart it if it is gone.

        Runs continue in the new cluster from their newest checkpoints.

        Args:
            stopping: Set when the service ends.
            on_ready: Called with the number of nodes.

        Raises ClusterError if the first start fails.
        """
        retry_s = FIRST_RETRY_S
        try:
            await self._start_unless(stopping)
        except ClusterError:
            if stopping.is_set():
                return
            raise
        if self._note is not None:
            on_ready(len(self._note.nodes) - 1)
        while not stopping.is_set():
            pause_s = WATCH_INTERVAL_S
            self._log_changes()
            if not await asyncio.to_thread(self._cluster.is_running):
                self._note = None
                log.error("the embedded Ray cluster is gone; restarting it")
                try:
                    await self._start_unless(stopping)
                    retry_s = FIRST_RETRY_S
                except ClusterError as exc:
                    log.error(
                        "the embedded Ray cluster did not start",
                        problem=str(exc),
                        next_try_s=retry_s,
                    )
                    pause_s, retry_s = retry_s, min(LONGEST_RETRY_S, 2 * retry_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), pause_s)


# ---------------------------------------------------------------- node returns

# When dead nodes of the embedded cluster are started again: soon, and later if one keeps dying.

RETRY_S: Final = 10.0
"""Seconds until a node that did not start is tried again."""
LONGEST_S: Final = 300.0
"""Longest pause before a node that keeps dying."""
FORGET_S: Final = 600.0
"""A death counts for this long."""


class NodeReturns:
    """The slots without a node, and when each gets another one.

    Args:
        return_s: Seconds after a first death; each further one within ``FORGET_S`` doubles them. 0
            starts no dead node again.
        now: Seconds since some fixed time.
        clock: Unix seconds, for people.
    """

    def __init__(
        self,
        return_s: float,
        now: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._return_s = return_s
        self._now = now
        self._clock = clock
        self._deaths: defaultdict[int, list[float]] = defaultdict(list)
        self._due: dict[int, float] = {}

    def died(self, slot: int) -> float | None:
        """Record a death; return the seconds until the node is started again, None for never."""
        now = self._now()
        recent = [at for at in self._deaths[slot] if now - at < FORGET_S]
        self._deaths[slot] = [*recent, now]
        if not self._return_s:
            return None
        wait_s = min(max(LONGEST_S, self._return_s), self._return_s * 2.0 ** min(len(recent), 30))
        self._due[slot] = now + wait_s
        return wait_s

    def tried(self, slot: int, *, is_up: bool) -> None:
        """Record a try to start a node."""
        if is_up:
            self._due.pop(slot, None)
        else:
            self._due[slot] = self._now() + RETRY_S

    def due(self) -> list[int]:
        """Return the slots whose time has come."""
        now = self._now()
        return sorted(slot for slot, at in self._due.items() if at <= now)

    def next_in_s(self) -> float:
        """Return the seconds until the next slot is due; infinity for none."""
        return max(0.0, min(self._due.values(), default=float("inf")) - self._now())

    def at(self) -> tuple[float, ...]:
        """Return when nodes are started again, in unix seconds, soonest first."""
        past = self._clock() - self._now()
        return tuple(sorted(round(past + at, 1) for at in self._due.values()))
