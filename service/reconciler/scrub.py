"""Scrubbing: read kept checkpoints back at a bounded rate, to find damage before a restore does."""

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
from service.model.rows import past
from service.model.states import TransitionConflict
from storage.checkpoints.store import CheckpointStore
from storage.errors import CorruptCheckpoint, StorageError, StorageNotFound
from storage.filesystem import Storage
from storage.run_dir import RunDir

PLAN_INTERVAL_S: Final = 60.0
"""Seconds between two queries for the checkpoints that are due."""
ORPHANS_AFTER_S: Final = 600.0
"""Seconds from a run's end to the collection of orphans, when its last processes are gone."""
ORPHANS_WITHIN_S: Final = 24 * 3600.0
"""At the start, runs that ended earlier than this count as collected."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ScrubRule:
    """How fast, and how often."""

    bytes_per_s: float = 10e6
    """Bytes a second over all runs; 0 turns scrubbing off."""
    interval_s: float = 24 * 3600.0
    """Seconds after its commit or last check until a checkpoint is due."""

    @property
    def is_on(self) -> bool:
        """Whether checkpoints are read back."""
        return self.bytes_per_s > 0


DEFAULT_RULE: Final = ScrubRule()


class ScrubStopped(Exception):
    """The service ends while a checkpoint is read."""


class Scrubber:
    """Verifies one checkpoint at a time, the oldest check first, and collects orphans of dead
    writers.

    Args:
        records: Records of checkpoints.
        events: Histories, which record the findings.
        storage: Storage of checkpoints.
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
        """Stop reading at once."""
        self._stopping.set()

    async def work(self) -> None:
        """Verify the next checkpoint that is due, if there is one. Raises DatabaseError."""
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
                if now - past(kept.checked_at, now) >= self._rule.interval_s
            )
        for run_id in self._records.ended_between(self._swept_until, now - ORPHANS_AFTER_S):
            try:
                orphans = CheckpointStore(RunDir(self._storage, run_id)).collect_orphans()
            except StorageError as exc:
                log.warning(
                    "a run's orphaned checkpoints could not be collected; trying again",
                    run_id=run_id,
                    problem=str(exc),
                )
                return
            if orphans:
                log.info(
                    "collected a run's orphaned checkpoints", run_id=run_id, directories=orphans
                )
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
                return  # Retention deleted it, and the journal reports that.
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
            return  # The run was deleted meanwhile.
        if problem:
            log.error(
                "a checkpoint is corrupt", checkpoint=kept.name, run_id=kept.run_id, problem=problem
            )


class Pace:
    """Limits a rate. A call with the size of a block waits until the next one is allowed."""

    def __init__(self, bytes_per_s: float, stopping: threading.Event) -> None:
        self._bytes_per_s = bytes_per_s
        self._stopping = stopping
        self._next_at = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        """Wait. Raises ScrubStopped once the service ends."""
        cost_s = num_bytes / self._bytes_per_s
        # Unused time does not raise the rate later.
        self._next_at = max(self._next_at, time.monotonic() - cost_s) + cost_s
        if self._stopping.wait(max(0.0, self._next_at - time.monotonic())):
            raise ScrubStopped
