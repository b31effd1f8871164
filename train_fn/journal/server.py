"""Write a run's journal. Only one process does."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from everstep.wire.drills import FLIPS, DrillKind
from everstep.wire.events import EventKind
from storage.errors import StorageError
from storage.logs.journal import read_journal
from storage.logs.journal_line import JournalEvent
from storage.logs.journal_writer import JournalWriter
from storage.run_control import DrillOrder, ProfileOrder, StackOrder, Stop
from storage.run_dir import RunDir
from train_fn.journal.delivery import Reply, SourceEvent
from train_fn.recovery.progress import ProgressTracker

READ_BATCH = 5000

logger = logging.getLogger(__name__)


class JournalServer:
    """Write one submission's journal. Clients call ``deliver`` one at a time, in any order.

    Args:
        told_step: newest step whose metrics the journals of earlier submissions have; None if they
            have none, or if that is not known.
    """

    def __init__(self, run_dir: RunDir, submission: int, told_step: int | None = None) -> None:
        self._run_dir, self._submission = run_dir, submission
        self._told_step = told_step
        self._writer: JournalWriter | None = None
        self._stop: Stop | None = None
        self._profile: ProfileOrder | None = None
        self._flip: DrillOrder | None = None
        self._stacks: StackOrder | None = None
        self._progress = ProgressTracker(told_step)
        try:
            self._open()
        except StorageError as exc:
            # Ray never restarts an actor that fails to start. So the next call opens the journal.
            logger.warning("the journal cannot be opened now: %s", exc)

    def _open(self) -> JournalWriter:
        """Return the open journal. Raise StorageError if it cannot be opened."""
        if self._writer is None:
            writer = JournalWriter(self._run_dir, self._submission)
            self._profile = self._flip = self._stacks = None
            self._progress = ProgressTracker(self._told_step)
            try:
                if writer.last_n:
                    self._read_back(self._run_dir)
            except BaseException:
                writer.close()
                raise
            self._writer = writer
        return self._writer

    def deliver(
        self, source: str, events: Sequence[SourceEvent], stop: Stop | None = None
    ) -> Reply:
        """Write those of ``events`` that are new. They are durable on return.

        Events of a rank whose attempt was replaced are dropped. The rank learns this from the
        reply's ``progress``. Raise StorageError if writing fails; send the events again then.
        """
        self._stop = stop or self._stop
        try:
            writer = self._open()
            if events:
                for line in writer.append([self._line(source, event) for event in events]):
                    self._note(line)
        except StorageError:
            self._progress.note_unwritten(source, ((each.kind, each.attempt) for each in events))
            raise
        self._progress.note_written(source)
        return Reply(
            writer.last_source_n(source),
            self._stop,
            self._progress.progress(),
            self._profile,
            self._flip,
            stacks=self._stacks,
        )

    def _read_back(self, run_dir: RunDir) -> None:
        """Read the state for replies from the journal, after an earlier server was killed."""
        cursor: str | None = None
        while True:
            events, cursor = read_journal(
                run_dir, self._submission, cursor, READ_BATCH, past_damage=True
            )
            for event in events:
                self._note(event)
            if not events:
                return

    def _line(self, source: str, event: SourceEvent) -> JournalEvent:
        return JournalEvent(
            at=event.at,
            kind=event.kind,
            submission=self._submission,
            attempt=event.attempt,
            data=event.data,
            source=source,
            source_n=event.source_n,
        )

    def _note(self, event: JournalEvent) -> None:
        self._progress.note(event.kind, event.attempt, event.data, event.at)
        if event.kind is EventKind.PROFILE_ORDERED:
            self._profile = ProfileOrder(
                event.data["id"], event.data["rank"], event.data["steps"], event.attempt
            )
        elif event.kind is EventKind.STACKS_ORDERED:
            self._stacks = StackOrder(event.data["id"], event.attempt)
        elif event.kind is EventKind.DRILL_STARTED and event.data["kind"] in FLIPS:
            kind = DrillKind(event.data["kind"])
            self._flip = DrillOrder(event.data["id"], kind, event.data["rank"], event.attempt)
