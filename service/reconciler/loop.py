"""The reconciler's loop: observe, decide, act."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog
from sqlalchemy import Connection

from service.annex import Beside
from service.cluster.ray_jobs import RayJobs
from service.db.engine import DatabaseError
from service.db.events import EventStore
from service.db.lease import Lease, LeaseLost, LeaseStore
from service.db.node_marks import NodeMarks
from service.db.projects import ProjectStore
from service.db.runs import RunStore
from service.figures import RunFigures
from service.reconciler.decide import decide
from service.reconciler.execute import Executor
from service.reconciler.facts import Decision
from service.reconciler.observe import Observer
from service.reconciler.ray_poller import Entrypoint, driver_entrypoint
from service.reconciler.scrub import DEFAULT_RULE, Scrubber, ScrubRule
from service.reconciler.tail import JournalTail
from service.storage_identity import KeptSteps, StorageGate
from storage.errors import StorageError
from storage.filesystem import Storage

INTERVAL_S: Final = 0.5
"""Seconds from the start of a tick to the start of the next."""
PAUSE_FACTOR: Final = 2.0
"""Length of the pause after a tick, in lengths of the tick."""
_LONGEST_PAUSE_S: Final = 3.0
TROUBLE_INTERVAL_S: Final = 2.0
LONGEST_TICK_S: Final = 300.0
"""Longest tick for which the lease is renewed. Then the process counts as stuck."""
KEPT_STEPS_INTERVAL_S: Final = 5.0
SCRUB_INTERVAL_S: Final = 1.0

log = structlog.get_logger(__name__)


class Reconciler:
    """Makes Ray's jobs match the runs in the database, and the database match what runs report.

    Args:
        runs: Runs.
        events: Histories of runs.
        node_marks: Marks of nodes.
        projects: Quotas of projects.
        storage: Storage of run directories.
        ray: The cluster.
        scrub_rule: How fast and how often checkpoints are read back.
        entrypoint: The shell command of a submission's job; None is the training driver.
        figures: Counters of what happens to runs; None makes private ones.
        leadership: Lease that lets one of several replicas reconcile; None for a single process.
        beside: Further work of this process, as long as it leads.
        public_url: Base URL of the dashboard; None if unknown.
        clock: Unix seconds.
    """

    def __init__(
        self,
        runs: RunStore,
        events: EventStore,
        node_marks: NodeMarks,
        projects: ProjectStore,
        storage: Storage,
        ray: RayJobs,
        *,
        scrub_rule: ScrubRule = DEFAULT_RULE,
        entrypoint: Entrypoint | None = None,
        figures: RunFigures | None = None,
        leadership: Leadership | None = None,
        beside: Sequence[Beside] = (),
        public_url: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        figures = figures or RunFigures(clock)
        gate = self._gate = StorageGate(storage, runs.storage)
        self._executor = Executor(
            runs,
            storage,
            ray,
            entrypoint or driver_entrypoint(storage.uri),
            figures,
            gate,
            public_url,
        )
        tail = JournalTail(storage, events, figures)
        self._observer = Observer(
            runs, node_marks, projects, tail, ray, self._executor.deliveries, gate, clock
        )
        self._leadership = leadership
        self._kept_steps = KeptSteps(storage, runs.checkpoints)
        self._scrubber = Scrubber(runs.checkpoints, events, storage, scrub_rule, clock)
        self._beside: list[Beside] = [
            Background(KEPT_STEPS_INTERVAL_S, self._publish_kept_steps),
            Background(SCRUB_INTERVAL_S, self._scrub),
            *beside,
        ]
        self._clock = clock
        self._tick_began = float("-inf")
        self.last_tick_at: float | None = None
        """When the last tick finished, unix seconds; None before the first."""

    def lag_s(self) -> float | None:
        """Return the seconds since the last finished tick, or None before the first."""
        return None if self.last_tick_at is None else max(0.0, self._clock() - self.last_tick_at)

    async def tick(self) -> tuple[Decision, ...]:
        """Observe, decide and act once, unless another process leads. Return the decisions.

        Raises DatabaseError if the database does not answer.
        """
        if self._leadership is not None and not await self._leadership.hold():
            await self._executor.close()
            self.last_tick_at = self._clock()
            return ()
        facts = await self._observer.observe()
        # In a thread: thousands of waiting runs take long enough to delay requests.
        decisions = await asyncio.to_thread(decide, facts)
        await self._executor.execute(decisions)
        for work in self._beside:
            work.tick()
        self.last_tick_at = self._clock()
        return decisions

    async def run(self, stopping: asyncio.Event) -> None:
        """Tick until ``stopping``. A failed tick is logged, and the next one tries again."""
        keeping = asyncio.create_task(self._keep_lease(), name="keep-lease")
        try:
            await self._tick_until(stopping)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await self.close()

    async def _keep_lease(self) -> None:
        """Renew the lease during a long tick, for example over many journals in an object store.

        Otherwise another process would take over in the middle of each such tick. A tick that does
        not end loses the lease.
        """
        while self._leadership is not None:
            await asyncio.sleep(RENEW_S)
            if self._leadership.leads and time.monotonic() - self._tick_began < LONGEST_TICK_S:
                with contextlib.suppress(
                    DatabaseError
                ):  # The tick fails with the same error and logs it.
                    await self._leadership.renew()

    async def _tick_until(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            began = self._tick_began = time.monotonic()
            try:
                await self.tick()
                took_s = time.monotonic() - began
                pause_s = min(max(PAUSE_FACTOR * took_s, INTERVAL_S - took_s), _LONGEST_PAUSE_S)
            except LeaseLost as exc:
                log.warning(
                    "another process leads; leaving this tick's work to it", problem=str(exc)
                )
                pause_s = INTERVAL_S
            except DatabaseError as exc:
                log.warning("the database does not answer; trying again", problem=str(exc))
                pause_s = TROUBLE_INTERVAL_S
            except Exception:
                log.exception("a tick failed; trying again")
                pause_s = TROUBLE_INTERVAL_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), pause_s)

    async def close(self) -> None:
        """Cancel all work. The next process may repeat any line of it."""
        self._scrubber.stop()
        for work in self._beside:
            await work.close()
        await self._observer.close()
        await self._executor.close()
        if self._leadership is not None:
            await self._leadership.release()

    async def _scrub(self) -> None:
        """Scrub, unless the storage is another one: what that lacks is not damaged."""
        if await asyncio.to_thread(self._gate.problem) is None:
            await self._scrubber.work()

    async def _publish_kept_steps(self) -> None:
        try:
            await asyncio.to_thread(self._gate.require)
            await asyncio.to_thread(self._kept_steps.publish)
        except StorageError as exc:
            log.warning(
                "the file of kept checkpoints could not be written; trying again",
                problem=str(exc),
            )


# ---------------------------------------------------------------- leadership

# The lease that lets one process at a time reconcile a database. Each write checks its fence.

LEASE_NAME: Final = "reconciler"
RENEW_S: Final = 1.0
"""Seconds between two renewals, and between two tries of a standby."""


class Leadership:
    """Whether this process reconciles."""

    def __init__(self, leases: LeaseStore) -> None:
        self._leases = leases
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"[:128]
        self._lease: Lease | None = None
        self._asked_at = float("-inf")

    @property
    def leads(self) -> bool:
        """Whether this process holds the lease."""
        return self._lease is not None

    def check(self, connection: Connection) -> None:
        """Guard a write of this process's reconciler. Raises LeaseLost if another process leads."""
        if self._lease is None:
            raise LeaseLost(f"{LEASE_NAME}: another process leads")
        self._lease.check(connection)

    async def hold(self) -> bool:
        """Take the lease, or renew it if due. Return whether this process leads.

        Raises DatabaseError.
        """
        asked_at = time.monotonic()
        if asked_at - self._asked_at < RENEW_S:
            return self.leads
        self._asked_at = asked_at
        led = self.leads
        self._lease = await asyncio.to_thread(self._leases.take, LEASE_NAME, self._holder)
        if self.leads != led:
            log.info(
                "this process reconciles now"
                if self.leads
                else "another process reconciles now; standing by"
            )
        return self.leads

    async def renew(self) -> None:
        """Renew the lease in the middle of a tick.

        If another process has held it since, it is lost, even if it is free again: the facts of
        this tick are out of date. Raises DatabaseError.
        """
        held = self._lease
        if held is None:
            return
        found = await asyncio.to_thread(self._leases.take, LEASE_NAME, self._holder)
        if self._lease is held and found != held:
            self._lease = None
            log.info("another process has reconciled meanwhile; dropping this tick's work")

    async def release(self) -> None:
        """Give the lease back, so that another process takes over at once."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            await asyncio.to_thread(self._leases.release, lease)
        except DatabaseError as exc:
            log.warning("the lease could not be given back; it expires by itself", problem=str(exc))


# ---------------------------------------------------------------- background

# Work that repeats beside the reconciler's ticks, one run at a time. If it hangs, ticks go on.


class Background:
    """Repeats ``work`` every ``interval_s`` seconds, from start to start."""

    def __init__(self, interval_s: float, work: Callable[[], Awaitable[None]]) -> None:
        self._interval_s = interval_s
        self._work = work
        self._task: asyncio.Future[None] | None = None
        self._began_at = float("-inf")

    def tick(self) -> None:
        """Start the work if it is due. Raises the error of the previous time."""
        if self._task is not None:
            if not self._task.done():
                return
            task, self._task = self._task, None
            task.result()
        if time.monotonic() - self._began_at >= self._interval_s:
            self._began_at = time.monotonic()
            self._task = asyncio.ensure_future(self._work())

    async def close(self) -> None:
        """Cancel running work. The next process may repeat any part of it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
