"""Write a submission's journal: number events, and drop repeated ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from everstep.spec import plain_text
from everstep.wire.events import EventKind
from storage.errors import StorageError
from storage.logs.growing_log import LogWriter, open_log
from storage.logs.journal import (
    JournalEvent,
    check_line,
    dump,
    encode,
    is_mark,
    is_rank,
    with_checksum,
)
from storage.run_dir import RunDir


@dataclass
class _Written:
    """State of the journal: the last number, the last event of each source, and the newest
    attempt."""

    last_n: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    attempt: int = 0

    def admit(self, event: JournalEvent) -> JournalEvent | None:
        """Number an event. Return None if its source sent it before, or is a rank of an attempt
        that was replaced."""
        if event.source_n <= self.sources.get(event.source, 0):
            return None
        if is_rank(event.source) and event.attempt < self.attempt:
            return None
        self.note_attempt(event.source, event.kind, event.attempt)
        self.last_n += 1
        self.sources[event.source] = event.source_n
        return replace(event, n=self.last_n)

    def note_attempt(self, source: str, kind: str, attempt: int) -> None:
        """Remember the newest attempt. A rank may report before the controller does."""
        if is_rank(source) or kind == EventKind.ATTEMPT_STARTED:
            self.attempt = max(self.attempt, attempt)

    def mark(self) -> bytes:
        return with_checksum(
            dump({"mark": {"n": self.last_n, "sources": self.sources, "attempt": self.attempt}})
        )


class JournalWriter:
    """The only writer of a submission's journal. Not thread-safe.

    It numbers events, and drops those that a source resends because it missed the response. Once a
    newer attempt has started, it refuses events of older ranks: their work is not part of the run.
    A process that takes over from a dead one continues after its last complete line.
    """

    def __init__(self, run_dir: RunDir, submission: int) -> None:
        self._run_dir = run_dir
        self._submission = submission
        self._log: LogWriter | None = None
        self._written = _Written()
        self._unmarked_bytes = 0
        self._open()

    @property
    def last_n(self) -> int:
        """Return the last number assigned; 0 while the journal is empty."""
        return self._written.last_n

    def last_source_n(self, source: str) -> int:
        """Return the last durable event of a source; 0 for none."""
        return self._written.sources.get(source, 0)

    def append(self, events: Sequence[JournalEvent]) -> list[JournalEvent]:
        """Number and write events durably. Return those that were written, neither dropped nor
        refused.

        Raises:
            StorageError: some of them may be written. Append the same events again: each is written
                once.
            LogTakenOver: another process has written this journal. The next append continues after
                its events.
        """
        log = self._log or self._open()
        state = _Written(self._written.last_n, dict(self._written.sources), self._written.attempt)
        mark = state.mark()
        fresh = [admitted for event in events if (admitted := state.admit(event))]
        lines = [encode(event) for event in fresh]
        if not lines:
            return []
        marked = self._unmarked_bytes >= log.mark_every_bytes
        try:
            log.append([mark, *lines] if marked else lines)
        except StorageError:
            self._forget_log()
            raise
        self._written = state
        self._unmarked_bytes = sum(map(len, lines)) + (0 if marked else self._unmarked_bytes)
        return fresh

    def close(self) -> None:
        if self._log is not None:
            log, self._log = self._log, None
            log.close()

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> LogWriter:
        """Open the log and recover its state from its end."""
        log = open_log(
            self._run_dir.files, self._run_dir.journal_stem(self._submission), durable=True
        )
        try:
            self._written, self._unmarked_bytes = _recover(log)
        except BaseException:
            log.close()
            raise
        self._log = log
        return log

    def _forget_log(self) -> None:
        """Close the log after a failed append: its state is recovered when it is opened again."""
        with suppress(StorageError):  # the append's own error says more
            self.close()


def _recover(log: LogWriter) -> tuple[_Written, int]:
    """Return a log's state, and the bytes since its last mark.

    Damaged lines at the end, which a crash of the machine leaves, are cut off. Damaged lines before
    events stay, and readers report them.
    """
    state, num_bytes, end = _Written(), 0, 0
    lines = log.tail(is_mark)
    for index, line in enumerate(lines):
        try:
            check_line(line)
            parsed = plain_text.parse_json(line)
            if is_mark(line):
                mark = parsed["mark"]
                state = _Written(mark["n"], dict(mark["sources"]), mark["attempt"])
                end = index + 1
                continue
            if parsed["n"] <= state.last_n:
                continue
            source, source_n = parsed["source"], parsed["source_n"]
            state.note_attempt(source, parsed["kind"], parsed["attempt"])
            state.last_n, state.sources[source], end = parsed["n"], source_n, index + 1
        except (ValueError, KeyError, TypeError):
            continue
        num_bytes += len(line)
    if spoilt := lines[end:]:
        log.cut(sum(len(line) + 1 for line in spoilt))
    return state, num_bytes
