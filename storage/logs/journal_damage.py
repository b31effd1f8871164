"""Damaged lines of a journal, and the events that stand for what was lost."""

from __future__ import annotations

from everstep.wire.events import EventKind
from storage.errors import CorruptFile
from storage.logs.journal_line import JournalEvent
from storage.logs.log_lines import LogCursor, LogLine
from storage.run_dir import RunDir

_MOST_LOST = 1000
"""Maximum number of events reported as lost in one place; a larger gap is not from a writer."""
_MAX_LISTED = 20


class Damage:
    """Damaged lines until the next sound line, which shows how many events were lost."""

    def __init__(self, run_dir: RunDir, submission: int, *, knows_last: bool) -> None:
        self._run_dir, self._submission = run_dir, submission
        self._last: JournalEvent | None = None
        self._last_n = 0 if knows_last else None
        self._lines: list[int] = []
        self._problem = ""
        self.end: LogCursor | None = None
        """Cursor after the last of them; None if there are none."""

    def add(self, line: LogLine, problem: Exception) -> None:
        self._lines.append(line.end.num_lines)
        self._problem = self._problem or str(problem)
        self.end = line.end

    def before(self, event: JournalEvent | None) -> list[JournalEvent]:
        """Return the events that replace those lost before ``event``, or before the journal's end
        if None; often none."""
        lost: list[JournalEvent] = []
        if self.end is not None:
            count = len(self._lines)
            if event is not None and self._last_n is not None:
                # If lines ran together, or a mark was damaged, this differs from the number of
                # lines.
                count = min(event.n - self._last_n - 1, _MOST_LOST)
            first = event.n - count if event is not None else (self._last_n or 0) + 1
            lost = [
                self._event(first + index, event or self._last) for index in range(max(0, count))
            ]
            self._lines, self._problem, self.end = [], "", None
        if event is not None:
            self._last, self._last_n = event, event.n
        return lost

    def _event(self, n: int, beside: JournalEvent | None) -> JournalEvent:
        data = {
            "file": _path(self._run_dir, self._submission),
            "lines": self._lines[:_MAX_LISTED],
            "problem": self._problem[:500],
        }
        return JournalEvent(
            kind=EventKind.JOURNAL_DAMAGED,
            at=beside.at if beside else 0.0,
            submission=self._submission,
            attempt=beside.attempt if beside else 0,
            data=data,
            source="storage",
            source_n=n,
            n=n,
        )


def _path(run_dir: RunDir, submission: int) -> str:
    stem = run_dir.files.path(run_dir.journal_stem(submission))
    return f"{stem}.jsonl" if run_dir.files.can_append else stem


def not_an_event(
    run_dir: RunDir, submission: int, line: LogLine, problem: Exception
) -> CorruptFile:
    where = f"journal line {line.end.num_lines} of {_path(run_dir, submission)}"
    return CorruptFile(f"{where} is damaged ({problem}): {line.data[:80]!r}")
