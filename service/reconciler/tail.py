"""Reads what submissions wrote into their journals, and applies it to the database with the cursor behind it."""

from __future__ import annotations

from collections.abc import Collection

import structlog

from service.db.events import EventStore, JournalGap
from service.db.rows import RunRow
from service.figures import RunFigures
from service.reconciler.facts import TailFact
from storage.errors import CorruptFile, StorageError
from storage.filesystem import Storage
from storage.journal import journal_stamp, read_journal

BATCH_EVENTS = 1000
MAX_BATCHES = 20

log = structlog.get_logger(__name__)


class JournalTail:
    """Follows the journal of every run's newest submission. Synchronous: call it in a thread."""

    def __init__(self, storage: Storage, events: EventStore, figures: RunFigures | None = None) -> None:
        self._storage = storage
        self._events = events
        self._figures = figures or RunFigures()
        self._drained: dict[str, tuple[int, str | None, object]] = {}
        """By run: submission, cursor and stamp of a journal that was read to its end. Losing it costs a look at the file."""

    def keep(self, run_ids: Collection[str]) -> None:
        """Forget the journals of all other runs."""
        self._drained = {run_id: known for run_id, known in self._drained.items() if run_id in run_ids}

    def drain(self, run: RunRow) -> tuple[RunRow, TailFact]:
        """Apply what the newest submission's journal holds now.

        Returns:
            The run as it then is, and whether the end of the journal was reached.

        Raises:
            TransitionConflict: The run is gone.
            DatabaseError: Nothing of the batch was applied; the next call does it again.
        """
        cursor = run.journal_cursor if run.journal_submission == run.submission else None
        stamp = journal_stamp(self._storage.run_dir(run.id), run.submission)
        known = (run.submission, cursor, stamp)
        if stamp is not None and self._drained.get(run.id) == known:
            return run, TailFact.DRAINED
        found, fact = self._drain_from(run, cursor)
        if fact == TailFact.DRAINED and found.journal_submission == found.submission == run.submission:
            # The stamp is from before the look: what came since makes another one.
            self._drained[run.id] = (found.submission, found.journal_cursor, stamp)
        return found, fact

    def _drain_from(self, run: RunRow, cursor: str | None) -> tuple[RunRow, TailFact]:
        try:
            return self._drain(run, cursor)
        except JournalGap as exc:
            # The cursor and the count disagree: from the beginning, where what is known already is passed over.
            log.warning("reading a journal again from its beginning", run_id=run.id, problem=str(exc))
            return self._drain(run, None)

    def _drain(self, run: RunRow, cursor: str | None) -> tuple[RunRow, TailFact]:
        submission, run_dir = run.submission, self._storage.run_dir(run.id)
        for _ in range(MAX_BATCHES):
            try:
                batch, cursor = read_journal(run_dir, submission, cursor, BATCH_EVENTS)
            except CorruptFile as exc:
                # What lies behind cannot be read, now or later. The next submission writes a journal of its own.
                log.error("a journal cannot be read on", run_id=run.id, submission=submission, problem=str(exc))
                return run, TailFact.DRAINED
            except StorageError as exc:
                log.warning("a journal could not be read", run_id=run.id, submission=submission, problem=str(exc))
                return run, TailFact.BEHIND
            if batch:
                known = run.journal_n if run.journal_submission == submission else 0
                run = self._events.apply_journal(run.id, submission, batch, cursor)
                if run.journal_submission == submission:
                    self._figures.applied(run, [event for event in batch if known < event.n <= run.journal_n])
            if len(batch) < BATCH_EVENTS or run.submission != submission or run.status.terminal:
                return run, TailFact.DRAINED
        return run, TailFact.BEHIND
