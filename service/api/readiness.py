"""Whether database, storage and Ray respond. They are probed at most once a second, because no
token is needed to ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import anyio
import anyio.to_thread
import structlog

from everstep.wire import Readiness
from service.cluster.cluster_view import ClusterView
from service.db.engine import Database, DatabaseError
from service.storage_identity import StorageGate
from storage.errors import StorageError
from storage.filesystem import Storage

logger = structlog.get_logger(__name__)

PROBE_TIMEOUT_S: Final = 5.0
KEPT_S: Final = 1.0


class ReadinessCheck:
    """Probes database, storage and Ray, and keeps the result for a second."""

    def __init__(
        self,
        database: Database,
        storage: Storage,
        storage_gate: StorageGate,
        cluster_view: ClusterView,
        lag_s: Callable[[], float | None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._storage = storage
        self._storage_gate = storage_gate
        self._cluster_view = cluster_view
        self.lag_s = lag_s
        """Returns the seconds since the reconciler's last finished tick; None before the first."""
        self._monotonic = monotonic
        self._answer: Readiness | None = None
        self._answered_at = float("-inf")
        self._lock = asyncio.Lock()
        # Own threads, so that hanging probes do not block requests. If all hang, later probes time
        # out.
        self._threads = anyio.CapacityLimiter(4)

    async def answer(self) -> Readiness:
        """Return what is up. Only a missing database or storage makes the service unavailable."""
        async with self._lock:
            if self._answer is None or self._monotonic() - self._answered_at > KEPT_S:
                self._answer = await self._probe()
                self._answered_at = self._monotonic()
            return self._answer.model_copy(update={"reconciler_lag_s": self.lag_s()})

    async def _probe(self) -> Readiness:
        database, storage, ray = await asyncio.gather(
            self._up("database", self._database.probe),
            self._up("storage", self._use_storage),
            self._ray_up(),
        )
        return Readiness(
            status="ready" if database and storage else "unavailable",
            database="up" if database else "down",
            storage="up" if storage else "down",
            ray="up" if ray else "down",
            reconciler_lag_s=None,
        )

    def _use_storage(self) -> None:
        """Raise StorageError unless the storage is writable and belongs to the database. The
        database's own probe reports an unavailable database."""
        self._storage.probe()
        with suppress(DatabaseError):
            self._storage_gate.require()

    async def _up(self, what: str, probe: Callable[[], None]) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await anyio.to_thread.run_sync(probe, abandon_on_cancel=True, limiter=self._threads)
        except (DatabaseError, StorageError, TimeoutError) as exc:
            logger.warning(
                "not_ready",
                what=what,
                error=str(exc) or f"no response within {PROBE_TIMEOUT_S:g} s",
            )
            return False
        return True

    async def _ray_up(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return (await self._cluster_view.cluster()).available
        except TimeoutError:
            return False
