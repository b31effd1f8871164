"""Scrubbing: kept checkpoints are read back again and again, at a bounded rate, so that damage is
known before it is met."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from service.db.checkpoints import CheckpointRecords, KeptCheckpoint
from service.db.events import EventStore
from service.model.states import TransitionConflict
from storage.checkpoints.store import CheckpointStore
from storage.errors import CorruptCheckpoint, StorageError, StorageNotFound
from storage.filesystem import Storage
from storage.run_dir import RunDir

PLAN_INTERVAL_S: Final = 60.0
"""How often the database is asked which checkpoints are due."""
ORPHANS_AFTER_S: Final = 600.0
"""A run's leavings are collected so long after its end, when its last processes are gone."""
ORPHANS_WITHIN_S: Final = 24 * 3600.0
"""Runs that ended before that are taken for swept when the service starts."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ScrubRule:
    """How fast, and how often."""

    bytes_per_s: float = 10e6
    """Over all runs; 0 turns scrubbing off."""
    interval_s: float = 24 * 3600.0
    """A checkpoint is due so long after it was committed or last read back."""

    @property
    def is_on(self) -> bool:
        return self.bytes_per_s > 0


DEFAULT_RULE: Final = ScrubRule()


class ScrubStopped(Exception):
    """The service ends."""


class Scrubber:
    """Verifies one checkpoint at a time, the one that was not looked at for longest; collects what
    dead writers left.

    Args:
        records: Which checkpoints there are.
        events: Where findings are recorded.
        storage: Where checkpoints lie.
        rule: How fast and how often.
        clock: Unix seconds.
    """

    def __init__(
        self,
        records: CheckpointRecords,
        events: EventStore,
        storage: Storage,
        rule: ScrubRule = DEFAULT_RULE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._records = records
        self._events = events
        self._storage = storage
        self._rule = rule
        self._clock = clock
        self._due: deque[KeptCheckpoint] = deque()
        self._planned_at = float("-inf")
        self._swept_until = clock() - ORPHANS_WITHIN_S
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Break off what is being read, at once."""
        self._stopping.set()

    async def work(self) -> None:
        """One look: the next checkpoint that is due, if there is one. Raises DatabaseError."""
        if not self._due and time.monotonic() - self._planned_at >= PLAN_INTERVAL_S:
            self._planned_at = time.monotonic()
            await asyncio.to_thread(self._plan)
        if self._due:
            await asyncio.to_thread(self._scrub, self._due.popleft())

    def _plan(self) -> None:
        now = self._clock()
        if self._rule.is_on:
            self._due.extend(
                kept
                for kept in self._records.kept()
                if now - kept.checked_at >= self._rule.interval_s
            )
        for run_id in self._records.ended_between(self._swept_until, now - ORPHANS_AFTER_S):
            try:
                orphans = CheckpointStore(RunDir(self._storage, run_id)).collect_orphans()
            except StorageError as exc:
                log.warning(
                    "what a run's writers left could not be collected; trying again",
                    run_id=run_id,
                    problem=str(exc),
                )
                return
            if orphans:
                log.info("collected what a run's writers left", run_id=run_id, directories=orphans)
        self._swept_until = max(self._swept_until, now - ORPHANS_AFTER_S)

    def _scrub(self, kept: KeptCheckpoint) -> None:
        problem = None
        try:
            CheckpointStore(RunDir(self._storage, kept.run_id)).verify(
                kept.name, Pace(self._rule.bytes_per_s, self._stopping)
            )
        except CorruptCheckpoint as exc:
            problem = str(exc)
        except StorageNotFound as exc:
            if not kept.run_ended:
                return  # retention let it go, and the journal will tell
            problem = str(exc)
        except ScrubStopped:
            return
        except StorageError as exc:
            log.warning(
                "a checkpoint could not be read back; trying again",
                checkpoint=kept.name,
                run_id=kept.run_id,
                problem=str(exc),
            )
            return
        try:
            self._events.record_check(kept.run_id, kept.name, problem, found_by="scrub")
        except TransitionConflict:
            return  # the run was deleted meanwhile
        if problem:
            log.error(
                "a checkpoint is corrupt", checkpoint=kept.name, run_id=kept.run_id, problem=problem
            )


class Pace:
    """Called with the size of every block that was read, it waits until the rate allows the
    next."""

    def __init__(self, bytes_per_s: float, stopping: threading.Event) -> None:
        self._bytes_per_s = bytes_per_s
        self._stopping = stopping
        self._next_at = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        """Raises ScrubStopped once the service ends."""
        cost_s = num_bytes / self._bytes_per_s
        # time that went by unused is not made up for
        self._next_at = max(self._next_at, time.monotonic() - cost_s) + cost_s
        if self._stopping.wait(max(0.0, self._next_at - time.monotonic())):
            raise ScrubStopped
