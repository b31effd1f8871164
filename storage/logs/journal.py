"""A submission's journal: one ordered log of what happened, written by one process, read from a
cursor (docs/event-log.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from everstep.spec import plain_text
from everstep.wire.events import EventKind
from storage.errors import CorruptFile, StorageError
from storage.logs.append_log import (
    MAX_LINE_BYTES,
    LogCursor,
    LogLine,
    LogWriter,
    log_stamp,
    open_log,
    read_log,
)
from storage.logs.line_checksum import CHECKSUM_BYTES, FIELD, has_checksum, with_checksum
from storage.run_dir import RunDir

_MARK_PREFIX = b'{"mark":'
_KIND_BYTES = 120
"""The kind is within this many bytes of a line's beginning."""
_MOST, _MOST_SECONDS = 2**31 - 1, 1e11
"""Largest number that a column of the database holds, and a time some thousand years from now."""
_LONG_TEXT_CHARS = 10_000
_MOST_LOST = 1000
"""Most events that are reported as lost in one place; a larger gap is no writer's number."""
_LINES_TOLD = 20
_BATCH_BYTES = 32 << 20
"""How much of a journal one call reads, whatever its limit of events."""


@dataclass(frozen=True, kw_only=True)
class JournalEvent:
    """One thing that happened in a submission."""

    kind: EventKind
    at: float
    """Unix seconds, by the clock of where it happened."""
    submission: int
    attempt: int = 0
    """Worker group that it belongs to; 0 for none."""
    data: dict[str, Any] = field(default_factory=dict)
    """JSON; see everstep/wire/events.py for each kind's. Floats that are not finite are written as
    null."""
    source: str
    """The process that reports it: "driver.5f0c93ab", "rank-0.a003.9d1e44c0". The random part gives
    a restarted process a new name, since its ``source_n`` begins again."""
    source_n: int
    """Position among that source's events, rising from 1."""
    n: int = 0
    """Position in the journal, from 1, without gaps; given by JournalWriter, 0 before."""


@dataclass
class _Written:
    """What the journal holds: the last number, the last event of each source, and the newest
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
            _dump({"mark": {"n": self.last_n, "sources": self.sources, "attempt": self.attempt}})
        )


class JournalWriter:
    """The one writer of a submission's journal. Not thread-safe.

    It numbers events, and drops those that a source sends again because it missed the reply. Once a
    newer attempt has begun, it refuses events of the older one's ranks: what they do is not part of
    the run. A process that takes over from a dead one continues after its last complete line.
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
        """The last number given; 0 while the journal is empty."""
        return self._written.last_n

    def last_source_n(self, source: str) -> int:
        """The last event of a source that is durable; 0 for none."""
        return self._written.sources.get(source, 0)

    def append(self, events: Sequence[JournalEvent]) -> list[JournalEvent]:
        """Number and write events, durably. Return those that were written, neither dropped nor
        refused.

        Raises:
            StorageError: some of them may be written. Append the same ones again: each is written
                once.
            LogTakenOver: another process has written this journal; the next append goes on after
                its events.
        """
        log = self._log or self._open()
        state = _Written(self._written.last_n, dict(self._written.sources), self._written.attempt)
        mark = state.mark()
        fresh = [admitted for event in events if (admitted := state.admit(event))]
        lines = [_encode(event) for event in fresh]
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
        """Open the log and learn its state from its end."""
        log = open_log(
            self._run_dir.files, self._run_dir.journal_stem(self._submission), durable=True
        )
        try:
            self._written, self._unmarked_bytes, knows_attempt = _recover(log)
            if not knows_attempt:
                self._written.attempt = self._newest_attempt()
        except BaseException:
            log.close()
            raise
        self._log = log
        return log

    def _newest_attempt(self) -> int:
        """Return the newest attempt of a journal whose marks do not name it (older versions)."""
        newest, cursor = self._written.attempt, None
        kinds = (EventKind.ATTEMPT_STARTED, EventKind.RESTORED)
        while True:
            events, cursor = read_journal(self._run_dir, self._submission, cursor, kinds=kinds)
            if not events:
                return newest
            newest = max(newest, *(event.attempt for event in events))

    def _forget_log(self) -> None:
        """Close the log after a failed append: its state is read again when it is opened."""
        with suppress(StorageError):  # the append's own error says more
            self.close()


def is_rank(source: str) -> bool:
    """Return whether a source is a rank of an attempt, not the driver or the controller."""
    return source.startswith("rank-")


def _recover(log: LogWriter) -> tuple[_Written, int, bool]:
    """Return a log's state, the bytes since its last mark, and whether that mark names the newest
    attempt.

    Spoilt lines at the end, which a crash of the machine leaves, are cut off. Spoilt lines before
    events stay, and readers report them.
    """
    state, num_bytes, knows_attempt, end = _Written(), 0, True, 0
    lines = log.tail(_is_mark)
    for index, line in enumerate(lines):
        try:
            has_checksum(line)
            parsed = plain_text.parse_json(line)
            if _is_mark(line):
                mark = parsed["mark"]
                knows_attempt = "attempt" in mark
                state = _Written(mark["n"], dict(mark["sources"]), mark.get("attempt", 0))
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
    return state, num_bytes, knows_attempt


def journal_stamp(run_dir: RunDir, submission: int) -> tuple[int, int, int] | None:
    """Return a value that changes whenever a submission's journal grows; None where only reading
    can tell."""
    return log_stamp(run_dir.files, run_dir.journal_stem(submission))


def read_journal(
    run_dir: RunDir,
    submission: int,
    cursor: str | None = None,
    limit: int = 1000,
    kinds: Collection[EventKind] | None = None,
    *,
    past_damage: bool = False,
    is_over: bool = False,
) -> tuple[list[JournalEvent], str]:
    """Return events after ``cursor``, oldest first, at most ``limit``, and the cursor after them.

    There are fewer than ``limit`` at the journal's end, and where events are long (``may_be_cut``):
    call again until none is left.

    A line that is still being written is never returned. A journal that does not exist (yet) has no
    events.

    Args:
        kinds: only these. Lines of other kinds are not parsed, which makes a long journal ten times
            faster to read.
        past_damage: read on after damaged lines. Each lost event is replaced by a
            ``journal_damaged`` one, which names file and line. A damaged end is left for the next
            writer to cut off.
        is_over: with ``past_damage``: nobody writes the journal any more, so a damaged end is
            reported too.

    Raises:
        CorruptFile: without ``past_damage``, if the line at the cursor is complete and damaged.
            What comes before it was returned first.
        InvalidStorage: the cursor was not made here.
    """
    position = LogCursor.parse(cursor)
    files, stem = run_dir.files, run_dir.journal_stem(submission)
    events: list[JournalEvent] = []
    wanted = None if kinds is None else [b'"kind":"%s"' % kind.value.encode() for kind in kinds]
    retried, num_bytes = False, 0
    damage = _Damage(run_dir, submission, knows_last=cursor is None)
    tells = wanted is None or EventKind.JOURNAL_DAMAGED in (kinds or ())
    while len(events) < limit and num_bytes < _BATCH_BYTES:
        try:
            lines = read_log(files, stem, damage.end or position, limit - len(events))
            if not lines:
                break
            for line in lines:
                try:
                    is_whole = has_checksum(line.data)
                    is_wanted = wanted is None or any(
                        kind in line.data[:_KIND_BYTES] for kind in wanted
                    )
                    event = _decode(line, is_whole) if is_wanted or not is_whole else None
                except (CorruptFile, ValueError) as exc:
                    if not past_damage:
                        raise _not_an_event(run_dir, submission, line, exc) from exc
                    damage.add(line, exc)
                    continue
                told = damage.before(event)
                position = line.end
                events += told if tells else []
                if event is not None and is_wanted:
                    events.append(event)
                    num_bytes += len(line.data)
        except CorruptFile:
            if events:
                break  # what comes before it first
            # A block boundary in a torn line, which a new writer cut off and wrote over between our
            # two reads, looks like this; it is gone when read again.
            if retried:
                raise
            retried = True
    if is_over and damage.end is not None:
        position = damage.end
        told = damage.before(None)
        events += told if tells else []
    return events, str(position)


def may_be_cut(before: str | None, after: str) -> bool:
    """Return whether ``read_journal``, between these two cursors, may have stopped because events
    are long."""
    begin, end = LogCursor.parse(before), LogCursor.parse(after)
    if end.segment:
        return end.segment > begin.segment + 1  # how long a segment is, its cursor does not say
    return end.offset_bytes - begin.offset_bytes >= _BATCH_BYTES


def _check_types(event: JournalEvent) -> None:
    """Raise ValueError for a field that no writer writes: user code can write lines, too."""
    numbers = (event.submission, event.attempt, event.source_n, event.n)
    if not all(type(number) is int and 0 <= number <= _MOST for number in numbers):
        raise ValueError("submission, attempt, source_n and n must be whole numbers from 0")
    if type(event.at) not in (int, float) or not 0 <= event.at <= _MOST_SECONDS:
        raise ValueError("at must be unix seconds")
    if not isinstance(event.source, str) or not isinstance(event.data, dict):
        raise ValueError("source must be text, and data a mapping")


class _Damage:
    """Damaged lines, until the next sound line tells how many events were lost."""

    def __init__(self, run_dir: RunDir, submission: int, *, knows_last: bool) -> None:
        self._run_dir, self._submission = run_dir, submission
        self._last: JournalEvent | None = None
        self._last_n = 0 if knows_last else None
        self._lines: list[int] = []
        self._problem = ""
        self.end: LogCursor | None = None
        """Behind the last of them; None where there is none."""

    def add(self, line: LogLine, problem: Exception) -> None:
        self._lines.append(line.end.num_lines)
        self._problem = self._problem or str(problem)
        self.end = line.end

    def before(self, event: JournalEvent | None) -> list[JournalEvent]:
        """Return the events that replace those lost before ``event``, or before the journal's end
        if None; often none."""
        told: list[JournalEvent] = []
        if self.end is not None:
            count = len(self._lines)
            if event is not None and self._last_n is not None:
                # Of lines that ran together, or of a mark, it is another number than that of the
                # lines.
                count = min(event.n - self._last_n - 1, _MOST_LOST)
            first = event.n - count if event is not None else (self._last_n or 0) + 1
            told = [
                self._event(first + index, event or self._last) for index in range(max(0, count))
            ]
            self._lines, self._problem, self.end = [], "", None
        if event is not None:
            self._last, self._last_n = event, event.n
        return told

    def _event(self, n: int, beside: JournalEvent | None) -> JournalEvent:
        data = {
            "file": _path(self._run_dir, self._submission),
            "lines": self._lines[:_LINES_TOLD],
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


def _not_an_event(
    run_dir: RunDir, submission: int, line: LogLine, problem: Exception
) -> CorruptFile:
    where = f"journal line {line.end.num_lines} of {_path(run_dir, submission)}"
    return CorruptFile(f"{where} is not what was written ({problem}): {line.data[:80]!r}")


def _is_mark(line: bytes) -> bool:
    return line.startswith(_MARK_PREFIX)


def _encode(event: JournalEvent) -> bytes:
    """Return the event's line. Long texts are cut if the line would be too long for readers."""
    fields = {
        "n": event.n,
        "at": event.at,
        "kind": event.kind.value,
        "submission": event.submission,
        "attempt": event.attempt,
        "source": event.source,
        "source_n": event.source_n,
        "data": event.data,
    }
    line = _dump(fields)
    if len(line) > MAX_LINE_BYTES - CHECKSUM_BYTES:
        line = _dump({**fields, "data": _cut(event.data)})
    if len(line) > MAX_LINE_BYTES - CHECKSUM_BYTES:
        line = _dump({**fields, "data": {"left_out_bytes": len(line)}})
    return with_checksum(line)


def _cut(value: Any) -> Any:
    """Return the value with every text cut to what a person would read."""
    if isinstance(value, str):
        return (
            value
            if len(value) <= _LONG_TEXT_CHARS
            else f"{value[:_LONG_TEXT_CHARS]}… ({len(value)} characters)"
        )
    if isinstance(value, dict):
        return {key: _cut(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(item) for item in value]
    return value


def _dump(value: dict[str, Any]) -> bytes:
    try:
        return _to_json(value)
    except ValueError:
        return _to_json(_finite(value))


def _to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=_plain).encode()


def _plain(value: Any) -> Any:
    """Return a number of an array library as a number, anything else as text: an event that cannot
    be encoded would be sent for ever."""
    return (
        value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else str(value)
    )


def _finite(value: Any) -> Any:
    """Return the value with null for every float that JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _decode(line: LogLine, is_whole: bool) -> JournalEvent | None:
    """Return the event in a line; None for a mark. Raises ValueError for anything else.

    Text that cannot be stored or sent on (lone surrogates, as in some error messages) is escaped.

    Args:
        is_whole: whether its checksum matches; lines of older versions have none.
    """
    if _is_mark(line.data):
        if not is_whole:
            plain_text.parse_json(line.data)  # two lines that ran together begin like one
        return None
    try:
        raw = plain_text.loads(line.data)
        if (raw.pop(FIELD, None) is not None) != is_whole:
            raise ValueError("its checksum is damaged")
        event = JournalEvent(**{**raw, "kind": EventKind(raw["kind"])})
        _check_types(event)
        return event
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"it is not an event: {exc!r}") from exc
