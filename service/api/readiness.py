"""Whether database, storage and Ray answer: tried out at most once a second, whoever asks, since
anyone may ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread
import structlog

from everstep.wire import Readiness
from service.db.engine import DatabaseError
from storage.errors import StorageError

if TYPE_CHECKING:
    from service.api.context import ApiContext

logger = structlog.get_logger(__name__)

PROBE_TIMEOUT_S: Final = 5.0
KEPT_S: Final = 1.0


class ReadinessCheck:
    """The last answer, and how a new one is found."""

    def __init__(
        self, context: ApiContext, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._context = context
        self._monotonic = monotonic
        self._answer: Readiness | None = None
        self._answered_at = float("-inf")
        self._lock = asyncio.Lock()
        # Own threads, so that probes that hang take none from requests; once all hang the next ones
        # time out waiting.
        self._threads = anyio.CapacityLimiter(4)

    async def answer(self) -> Readiness:
        """What is up; not ready only where database or storage is down."""
        async with self._lock:
            if self._answer is None or self._monotonic() - self._answered_at > KEPT_S:
                self._answer = await self._probe()
                self._answered_at = self._monotonic()
            return self._answer.model_copy(
                update={"reconciler_lag_s": self._context.reconciler_lag_s()}
            )

    async def _probe(self) -> Readiness:
        context = self._context
        database, storage, ray = await asyncio.gather(
            self._up("database", context.database.probe),
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
        """See that the storage takes bytes and is the known one. A database that is away says
        nothing of it."""
        self._context.storage.probe()
        with suppress(DatabaseError):
            self._context.storage_gate.require()

    async def _up(self, what: str, probe: Callable[[], None]) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await anyio.to_thread.run_sync(probe, abandon_on_cancel=True, limiter=self._threads)
        except (DatabaseError, StorageError, TimeoutError) as exc:
            logger.warning(
                "not_ready", what=what, error=str(exc) or f"no answer within {PROBE_TIMEOUT_S:g} s"
            )
            return False
        return True

    async def _ray_up(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return (await self._context.cluster_view.cluster()).available
        except TimeoutError:
            return False
