"""The supervisor of the embedded cluster: it restarts a cluster that lost its head or keeper."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import structlog

from service.cluster.cluster_note import ClusterNote
from service.cluster.ray_jobs import RayEndpoint
from service.embedded.cluster import ClusterError, EmbeddedCluster
from service.embedded.processes import lives

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

    def make_way(self) -> None:
        """Let the cluster's control processes run beside the ranks for a while, as a submission
        needs them."""
        note = self._note
        if note is not None and note.makes_way and lives(note.keeper_pid, note.temp_dir):
            with contextlib.suppress(ProcessLookupError):
                os.kill(note.keeper_pid, signal.SIGUSR2)

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
