"""The tail of journals: read new events and apply them to the database together with the cursor."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final

import structlog

from service.db.engine import DatabaseError
from service.db.events import EventStore, JournalGap
from service.figures import RunFigures
from service.model.run_rows import RunRow
from service.model.states import TransitionConflict
from service.reconciler.facts import TailFact
from storage.errors import CorruptFile, StorageError
from storage.filesystem import Storage
from storage.logs.journal import journal_stamp, may_be_cut, read_journal
from storage.run_dir import RunDir

BATCH_EVENTS = 1000
MAX_BATCHES = 20

log = structlog.get_logger(__name__)


class JournalTail:
    """Follows the journal of each run's newest submission. Synchronous: call it in a thread.

    Ranks whose driver died write to its journal until they leave, while the next driver starts. The
    next journal begins after they have left. So the older one is read until then, and to its end.
    """

    def __init__(
        self, storage: Storage, events: EventStore, figures: RunFigures | None = None
    ) -> None:
        self._storage = storage
        self._events = events
        self._figures = figures or RunFigures()
        self._drained: dict[str, tuple[int, str | None, object]] = {}
        """Run id -> submission, cursor and stamp of a journal that was read to its end. A cache."""

    def keep(self, run_ids: Collection[str]) -> None:
        """Forget the journals of all other runs."""
        # Copied first, since other threads read slow journals.
        kept = list(self._drained.items())
        self._drained = {run_id: known for run_id, known in kept if run_id in run_ids}

    def drain(self, run: RunRow) -> tuple[RunRow, TailFact]:
        """Apply the new events of the newest submission's journal.

        Returns:
            The run afterwards, and whether the end of the journal was reached.

        Raises:
            TransitionConflict: The run is gone.
            DatabaseError: Nothing of the batch was applied. The next call tries again.
        """
        stamp = journal_stamp(RunDir(self._storage, run.id), run.submission)
        known = (
            run.submission,
            run.journal_cursor if run.journal_submission == run.submission else None,
            stamp,
        )
        if stamp is not None and self._drained.get(run.id) == known:
            return run, TailFact.DRAINED
        found, fact = run, TailFact.DRAINED
        submissions, is_all = self._to_read(run)
        for submission in submissions:
            found, fact = self._drain_one(found, submission)
            if (
                fact != TailFact.DRAINED
                or found.submission != run.submission
                or found.status.terminal
            ):
                break
        if fact == TailFact.DRAINED and not is_all and not found.status.terminal:
            fact = TailFact.BEHIND
        if (
            fact == TailFact.DRAINED
            and found.journal_submission == found.submission == run.submission
        ):
            # The stamp is from before the read, so later events make another one.
            self._drained[run.id] = (found.submission, found.journal_cursor, stamp)
        return found, fact

    def _to_read(self, run: RunRow) -> tuple[range, bool]:
        """Return the submissions to read: those that may have new events, and the newest once it
        began.

        The second value is False if it is unknown whether the newest began.
        """
        older = range(run.journal_submission or run.submission, run.submission)
        if older:
            try:
                first, _ = read_journal(
                    RunDir(self._storage, run.id), run.submission, None, 1, past_damage=True
                )
            except CorruptFile:
                first = []  # Nothing of it will be applied.
            except StorageError as exc:
                log.warning(
                    "a journal could not be read",
                    run_id=run.id,
                    submission=run.submission,
                    problem=str(exc),
                )
                return older, False
            if not first:
                return older, True
        return range(older.start, run.submission + 1), True

    def _drain_one(self, run: RunRow, submission: int) -> tuple[RunRow, TailFact]:
        try:
            return self._drain(
                run,
                submission,
                run.journal_cursor if run.journal_submission == submission else None,
            )
        except JournalGap as exc:
            # The cursor and the count disagree. Read from the beginning; known events are skipped.
            log.warning(
                "reading a journal again from its beginning", run_id=run.id, problem=str(exc)
            )
        try:
            return self._drain(run, submission, None)
        except (
            JournalGap
        ) as exc:  # No writer leaves a gap, so the events behind it are never applied.
            log.error(
                "a journal cannot be read on",
                run_id=run.id,
                submission=submission,
                problem=str(exc),
            )
            return run, TailFact.DRAINED

    def _drain(self, run: RunRow, submission: int, cursor: str | None) -> tuple[RunRow, TailFact]:
        newest, run_dir = run.submission, RunDir(self._storage, run.id)
        for _ in range(MAX_BATCHES):
            begin = cursor
            try:
                over = submission < newest
                batch, cursor = read_journal(
                    run_dir, submission, cursor, BATCH_EVENTS, past_damage=True, is_over=over
                )
            except CorruptFile as exc:
                # The rest can never be read. The next submission writes its own journal.
                log.error(
                    "the rest of a journal cannot be read",
                    run_id=run.id,
                    submission=submission,
                    problem=str(exc),
                )
                return run, TailFact.DRAINED
            except StorageError as exc:
                log.warning(
                    "a journal could not be read",
                    run_id=run.id,
                    submission=submission,
                    problem=str(exc),
                )
                return run, TailFact.BEHIND
            if batch:
                known = run.journal_n if run.journal_submission == submission else 0
                try:
                    run = self._events.apply_journal(run.id, submission, batch, cursor)
                except (DatabaseError, TransitionConflict):
                    raise
                except Exception:
                    # A bug of ours must not stop the other runs, nor this one forever.
                    log.exception(
                        "a journal cannot be applied",
                        run_id=run.id,
                        submission=submission,
                        after=known,
                    )
                    return run, TailFact.DRAINED
                if run.journal_submission == submission:
                    self._figures.applied(
                        run, [event for event in batch if known < event.n <= run.journal_n]
                    )
            at_end = len(batch) < BATCH_EVENTS and not may_be_cut(begin, cursor)
            if at_end or run.submission != newest or run.status.terminal:
                return run, TailFact.DRAINED
        return run, TailFact.BEHIND


# ---------------------------------------------------------------- drains

# The reading of many runs' journals. A slow journal continues on its own thread and delays no
# other.


RUN_PATIENCE_S: Final = 5.0
"""Longest wait of a tick for one run's journal. A slower one continues in the background and counts
as not read to its end."""
MOST_SLOW: Final = 64
"""Most journals that are read in the background, each on a thread."""

Outcome = tuple[RunRow, TailFact] | DatabaseError | None
"""The run afterwards, and how far its journal was read; None if the run is gone."""
Drain = Callable[[RunRow], tuple[RunRow, TailFact]]


class Drains:
    """Reads journals on threads. A storage may hang for one directory and serve all others, and
    nothing can end a read that hangs.

    Only one thread at a time may call ``read``.
    """

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._reading: set[str] = set()
        """Runs whose journal is being read."""
        self._slow: set[str] = set()
        """Runs whose journal was slow to read at the last tick."""

    def read(self, rows: Sequence[RunRow]) -> dict[str, tuple[RunRow, TailFact]]:
        """Read the journals. Return each run afterwards, and how far its journal was read.

        Runs that are gone are left out. Those that were slow come last, and delay no other.

        Raises DatabaseError.
        """
        were_slow, self._slow = self._slow, set(self._reading)
        found = {row.id: (row, TailFact.BEHIND) for row in rows}
        due = [row for row in rows if row.id not in self._slow]
        waiting = deque(sorted(due, key=lambda row: row.id in were_slow))
        outcomes = queue.SimpleQueue[tuple[str, Outcome]]()
        left = {row.id for row in waiting}
        while left:
            # One thread reads all, until it is slow: then another one reads the rest beside it.
            thread = threading.Thread(
                target=self._read_each, args=(waiting, outcomes), name="journals", daemon=True
            )
            thread.start()
            while told := _next(outcomes, left):
                run_id, outcome = told
                left.discard(run_id)
                if isinstance(outcome, DatabaseError):
                    waiting.clear()
                    raise outcome
                if outcome is None:
                    del found[run_id]
                else:
                    found[run_id] = outcome
            if slow := left & self._reading:
                log.warning("journals are slow to read; reading the others", run_ids=sorted(slow))
            self._slow |= slow
            left -= slow
            if len(self._slow) >= MOST_SLOW:
                log.error("too many journals are slow; reading the rest later", runs=len(left))
                break
        waiting.clear()
        return found

    def _read_each(
        self, waiting: deque[RunRow], outcomes: queue.SimpleQueue[tuple[str, Outcome]]
    ) -> None:
        """Read the journals of waiting runs until there are none."""
        with suppress(IndexError):
            while True:
                row = waiting.popleft()
                self._reading.add(row.id)
                outcome = self._outcome(row)
                self._reading.discard(row.id)
                outcomes.put((row.id, outcome))

    def _outcome(self, row: RunRow) -> Outcome:
        try:
            return self._drain(row)
        except TransitionConflict:
            return None
        except DatabaseError as exc:
            return exc
        except Exception:  # A bug of ours must not stop the other runs.
            log.exception("a journal cannot be read", run_id=row.id)
            return row, TailFact.BEHIND


def _next(
    outcomes: queue.SimpleQueue[tuple[str, Outcome]], left: set[str]
) -> tuple[str, Outcome] | None:
    """Return the next outcome; None if none is left, or it takes too long."""
    try:
        return outcomes.get(timeout=RUN_PATIENCE_S) if left else None
    except queue.Empty:
        return None
