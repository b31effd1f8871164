"""The reconciler: look, decide, act, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

import structlog

from service.cluster.ray_jobs import RayJobs
from service.control_files.kept_checkpoints import KeptSteps
from service.control_files.node_marks import MarksFile
from service.db.engine import DatabaseError
from service.db.events import EventStore
from service.db.lease import LeaseLost
from service.db.node_marks import NodeMarkStore
from service.db.projects import ProjectStore
from service.db.runs import RunStore
from service.figures import RunFigures
from service.reconciler.background import Background
from service.reconciler.decide import decide
from service.reconciler.decisions import Decision
from service.reconciler.entrypoint import Entrypoint, driver_entrypoint
from service.reconciler.execute import Executor
from service.reconciler.leadership import RENEW_S, Leadership
from service.reconciler.node_care import NodeCare
from service.reconciler.observe import Observer
from service.reconciler.pace import PAUSE_FACTOR
from service.reconciler.scrub import DEFAULT_RULE as DEFAULT_SCRUB_RULE
from service.reconciler.scrub import Scrubber, ScrubRule
from service.reconciler.tail import JournalTail
from service.reconciler.unhealthy import DEFAULT_RULE, CordonRule
from service.reconciler.webhook_sender import Notifier
from service.storage_identity.gate import StorageGate
from storage.errors import StorageError
from storage.filesystem import Storage

INTERVAL_S: Final = 0.5
"""From one tick's beginning to that of the next."""
_LONGEST_PAUSE_S: Final = 3.0
TROUBLE_INTERVAL_S: Final = 2.0
LONGEST_TICK_S: Final = 300.0
"""How long a tick may take before its process counts as one that stands still."""
KEPT_STEPS_INTERVAL_S: Final = 5.0
SCRUB_INTERVAL_S: Final = 1.0
NOTIFY_INTERVAL_S: Final = 1.0

log = structlog.get_logger(__name__)


class Reconciler:
    """Brings Ray's jobs in line with the database's runs, and the database in line with what runs
    report.

    Args:
        runs: Runs.
        events: Their histories.
        node_marks: What was said of nodes.
        projects: Their quotas.
        storage: Where run directories lie.
        ray: The cluster.
        cordon_rule: When a node is cordoned by itself.
        scrub_rule: How fast and how often checkpoints are read back.
        entrypoint: The shell command of a submission's job; None is the training driver.
        figures: Where what happens to runs is counted; None keeps counters of its own.
        notifier: Tells webhooks; None tells nobody.
        leadership: Who reconciles where several replicas share a database; None where this process
            is the only one.
        clock: Unix seconds.
    """

    def __init__(
        self,
        runs: RunStore,
        events: EventStore,
        node_marks: NodeMarkStore,
        projects: ProjectStore,
        storage: Storage,
        ray: RayJobs,
        *,
        cordon_rule: CordonRule = DEFAULT_RULE,
        scrub_rule: ScrubRule = DEFAULT_SCRUB_RULE,
        entrypoint: Entrypoint | None = None,
        figures: RunFigures | None = None,
        leadership: Leadership | None = None,
        notifier: Notifier | None = None,
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
            runs, node_marks, projects, tail, ray, self._executor.told, gate, clock
        )
        self._node_care = NodeCare(
            node_marks, MarksFile(storage, node_marks), ray, cordon_rule, clock
        )
        self._leadership = leadership
        self._kept_steps = KeptSteps(storage, runs.checkpoints)
        self._scrubber = Scrubber(runs.checkpoints, events, storage, scrub_rule, clock)
        self._beside = [
            Background(KEPT_STEPS_INTERVAL_S, self._publish_kept_steps),
            Background(SCRUB_INTERVAL_S, self._scrub),
        ]
        if notifier is not None:
            self._beside.append(Background(NOTIFY_INTERVAL_S, notifier.work))
        self._clock = clock
        self._wake = asyncio.Event()
        self._tick_began = float("-inf")
        self.last_tick_at: float | None = None
        """When the last tick was finished, unix seconds; None before the first."""

    @property
    def ray_problem(self) -> str | None:
        """Why Ray did not answer when it was last asked; None where it did."""
        return self._observer.ray_problem

    def lag_s(self) -> float | None:
        """Seconds since the last finished tick; None before the first."""
        return None if self.last_tick_at is None else max(0.0, self._clock() - self.last_tick_at)

    def wake(self) -> None:
        """Tick at once rather than after the pause. Call it in the reconciler's event loop."""
        self._wake.set()

    async def tick(self) -> tuple[Decision, ...]:
        """Look once, decide, act; nothing where another process leads. Returns what was decided.

        Raises DatabaseError where the database is away.
        """
        if self._leadership is not None and not await self._leadership.hold():
            await self._executor.close()
            self.last_tick_at = self._clock()
            return ()
        facts = await self._observer.look()
        # In a thread: thousands of waiting runs take long enough to hold up requests.
        decisions = await asyncio.to_thread(decide, facts)
        await self._executor.execute(decisions)
        self._node_care.tick()
        for work in self._beside:
            work.tick()
        self.last_tick_at = self._clock()
        return decisions

    async def run(self, stopping: asyncio.Event) -> None:
        """Tick until ``stopping``. Trouble in a tick is logged and the next one tries again:
        nothing else restarts this loop."""
        keeping = asyncio.create_task(self._keep_lease(), name="keep-lease")
        try:
            await self._tick_until(stopping)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await self.close()

    async def _keep_lease(self) -> None:
        """Renew the lease while a tick takes long, as one over many journals in an object store
        may: else others would take it over in the middle of it, time after time. Not of one that
        does not end: another process may do better."""
        while self._leadership is not None:
            await asyncio.sleep(RENEW_S)
            if self._leadership.leads and time.monotonic() - self._tick_began < LONGEST_TICK_S:
                with contextlib.suppress(DatabaseError):  # the tick meets it, too, and says so
                    await self._leadership.renew()

    async def _tick_until(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            began = self._tick_began = time.monotonic()
            try:
                await self.tick()
                took_s = time.monotonic() - began
                pause_s = min(max(PAUSE_FACTOR * took_s, INTERVAL_S - took_s), _LONGEST_PAUSE_S)
            except LeaseLost as exc:
                log.warning("what was begun is left to another process", problem=str(exc))
                pause_s = INTERVAL_S
            except DatabaseError as exc:
                log.warning("the database does not answer; trying again", problem=str(exc))
                pause_s = TROUBLE_INTERVAL_S
            except Exception:
                log.exception("a tick failed; trying again")
                pause_s = TROUBLE_INTERVAL_S
            await self._pause(pause_s, stopping)

    async def close(self) -> None:
        """Let go of what is under way. Any line of it may be repeated by the next process."""
        self._scrubber.stop()
        for work in self._beside:
            await work.close()
        await self._node_care.close()
        await self._observer.close()
        await self._executor.close()
        if self._leadership is not None:
            await self._leadership.release()

    async def _scrub(self) -> None:
        """Not of another storage, which lacks what is looked for: that is no damage."""
        if await asyncio.to_thread(self._gate.problem) is None:
            await self._scrubber.work()

    async def _publish_kept_steps(self) -> None:
        try:
            await asyncio.to_thread(self._gate.require)
            await asyncio.to_thread(self._kept_steps.publish)
        except StorageError as exc:
            log.warning(
                "drivers cannot be told which checkpoints others wait for; trying again",
                problem=str(exc),
            )

    async def _pause(self, seconds: float, stopping: asyncio.Event) -> None:
        self._wake.clear()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._wake, stopping)]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await wait
