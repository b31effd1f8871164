"""Read a submission's journal: one ordered log of events, from a cursor (docs/event-log.md)."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from everstep.spec import plain_text
from everstep.wire.events import EventKind
from storage.errors import CorruptFile
from storage.logs.growing_log import MAX_LINE_BYTES, LogCursor, TimedLine, log_stamp, read_log
from storage.run_dir import RunDir

_BATCH = 5000
_BATCH_BYTES = 32 << 20
"""How much of a journal one call reads, whatever its limit of events."""


def journal_stamp(run_dir: RunDir, submission: int) -> tuple[int, int, int] | None:
    """Return a value that changes whenever a submission's journal grows; None if only reading can
    tell."""
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

    There are fewer than ``limit`` at the journal's end, and if events are long (``may_be_cut``):
    call again until none is left. A line that is still being written is never returned. A journal
    that does not exist (yet) has no events.

    Args:
        kinds: return only these. Lines of other kinds are not parsed, which makes reading a long
            journal ten times faster.
        past_damage: continue after damaged lines. Each lost event is replaced by a
            ``journal_damaged`` one, which names file and line. A damaged end is left for the next
            writer to cut off.
        is_over: with ``past_damage``: nobody writes the journal any more, so a damaged end is
            reported too.

    Raises:
        CorruptFile: without ``past_damage``, if the line at the cursor is complete and damaged.
            Events before it were returned first.
        InvalidStorage: the cursor is invalid.
    """
    position = LogCursor.parse(cursor)
    files, stem = run_dir.files, run_dir.journal_stem(submission)
    events: list[JournalEvent] = []
    wanted = None if kinds is None else [b'"kind":"%s"' % kind.value.encode() for kind in kinds]
    retried, num_bytes = False, 0
    damage = Damage(run_dir, submission, knows_last=cursor is None)
    tells = wanted is None or EventKind.JOURNAL_DAMAGED in (kinds or ())
    while len(events) < limit and num_bytes < _BATCH_BYTES:
        try:
            lines = read_log(files, stem, damage.end or position, limit - len(events))
            if not lines:
                break
            for line in lines:
                try:
                    check_line(line.data)
                    is_wanted = wanted is None or any(
                        kind in line.data[:KIND_BYTES] for kind in wanted
                    )
                    event = decode(line) if is_wanted else None
                except (CorruptFile, ValueError) as exc:
                    if not past_damage:
                        raise not_an_event(run_dir, submission, line, exc) from exc
                    damage.add(line, exc)
                    continue
                lost = damage.before(event)
                position = line.end
                events += lost if tells else []
                if event is not None and is_wanted:
                    events.append(event)
                    num_bytes += len(line.data)
        except CorruptFile:
            if events:
                break  # return what comes before it first
            # A new writer may have cut off and overwritten a torn line between our two reads: try
            # once more.
            if retried:
                raise
            retried = True
    if is_over and damage.end is not None:
        position = damage.end
        lost = damage.before(None)
        events += lost if tells else []
    return events, str(position)


def journal_events(
    run_dir: RunDir,
    submissions: Iterable[int] | None = None,
    kinds: Collection[EventKind] | None = None,
    *,
    is_over: bool = False,
) -> Iterator[JournalEvent]:
    """Yield the events of these submissions' journals, or of all, in order; with ``past_damage``
    and otherwise as ``read_journal``."""
    for submission in run_dir.submissions() if submissions is None else submissions:
        cursor: str | None = None
        while True:
            events, cursor = read_journal(
                run_dir, submission, cursor, _BATCH, kinds, past_damage=True, is_over=is_over
            )
            yield from events
            if not events:
                break


def may_be_cut(before: str | None, after: str) -> bool:
    """Return whether ``read_journal``, between these two cursors, may have stopped because events
    are long."""
    begin, end = LogCursor.parse(before), LogCursor.parse(after)
    if end.segment:
        return end.segment > begin.segment + 1  # a cursor does not tell the length of a segment
    return end.offset_bytes - begin.offset_bytes >= _BATCH_BYTES


# ---------------------------------------------------------------- journal line

# A line of a journal: an event or a mark, with its encoding and decoding.

_MARK_PREFIX = b'{"mark":'
KIND_BYTES = 120
"""The kind is within this many bytes of the start of a line."""
_MOST, _MOST_SECONDS = 2**31 - 1, 1e11
"""Largest number that a database column can hold, and a time some thousand years from now."""
_LONG_TEXT_CHARS = 10_000


@dataclass(frozen=True, kw_only=True)
class JournalEvent:
    """An event of a submission."""

    kind: EventKind
    at: float
    """Unix seconds, by the clock of the reporting host."""
    submission: int
    attempt: int = 0
    """Attempt that it belongs to; 0 for none."""
    data: dict[str, Any] = field(default_factory=dict)
    """JSON; everstep/wire/events.py describes it for each kind. Floats that are not finite are
    written as null."""
    source: str
    """Process that reports it: "driver.5f0c93ab", "rank-0.a003.9d1e44c0". The random part gives a
    restarted process a new name, since its ``source_n`` starts again."""
    source_n: int
    """Position among that source's events, increasing from 1."""
    n: int = 0
    """Position in the journal, from 1, without gaps. Assigned by JournalWriter; 0 before."""


def is_rank(source: str) -> bool:
    """Return whether a source is a rank of an attempt, not the driver or the controller."""
    return source.startswith("rank-")


def _check_types(event: JournalEvent) -> None:
    """Raise ValueError for a field that no writer writes: user code can write lines, too."""
    numbers = (event.submission, event.attempt, event.source_n, event.n)
    if not all(type(number) is int and 0 <= number <= _MOST for number in numbers):
        raise ValueError("submission, attempt, source_n and n must be whole numbers from 0")
    if type(event.at) not in (int, float) or not 0 <= event.at <= _MOST_SECONDS:
        raise ValueError("at must be unix seconds")
    if not isinstance(event.source, str) or not isinstance(event.data, dict):
        raise ValueError("source must be text, and data a mapping")


def is_mark(line: bytes) -> bool:
    return line.startswith(_MARK_PREFIX)


def encode(event: JournalEvent) -> bytes:
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
    line = dump(fields)
    if len(line) > MAX_LINE_BYTES - CHECKSUM_BYTES:
        line = dump({**fields, "data": _cut(event.data)})
    if len(line) > MAX_LINE_BYTES - CHECKSUM_BYTES:
        line = dump({**fields, "data": {"left_out_bytes": len(line)}})
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


def dump(value: dict[str, Any]) -> bytes:
    try:
        return _to_json(value)
    except ValueError:
        return _to_json(_finite(value))


def _to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=_plain).encode()


def _plain(value: Any) -> Any:
    """Return a scalar of an array library as a number, anything else as text. An event that cannot
    be encoded would be resent for ever."""
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


def decode(line: TimedLine) -> JournalEvent | None:
    """Return the event in a line whose checksum matches; None for a mark. Raises ValueError for
    anything else.

    Text that cannot be stored or sent on (lone surrogates, as in some error messages) is escaped.
    """
    if is_mark(line.data):
        return None
    try:
        raw = plain_text.loads(line.data)
        del raw[FIELD]
        event = JournalEvent(**{**raw, "kind": EventKind(raw["kind"])})
        _check_types(event)
        return event
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"it is not an event: {exc!r}") from exc


# ---------------------------------------------------------------- journal damage

# Damaged lines of a journal, and the events that stand for what was lost.

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

    def add(self, line: TimedLine, problem: Exception) -> None:
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
    run_dir: RunDir, submission: int, line: TimedLine, problem: Exception
) -> CorruptFile:
    where = f"journal line {line.end.num_lines} of {_path(run_dir, submission)}"
    return CorruptFile(f"{where} is damaged ({problem}): {line.data[:80]!r}")


# ---------------------------------------------------------------- line checksum

# A checksum at the end of a JSON line: ``{…}`` becomes ``{…,"crc":"1a2b3c4d"}``.

CHECKSUM_BYTES = 17
"""Number of bytes that it adds to a line."""
FIELD = "crc"
_SUFFIX = re.compile(rb',"crc":"([0-9a-f]{8})"}\Z')


def with_checksum(line: bytes) -> bytes:
    """Return a JSON object's line with the CRC-32 of its bytes as its last field."""
    return b'%s,"crc":"%08x"}' % (line[:-1], zlib.crc32(line))


def check_line(line: bytes) -> None:
    """Raise ValueError unless the line ends with the checksum of what is before it."""
    found = _SUFFIX.search(line, max(0, len(line) - CHECKSUM_BYTES - 1))
    if found is None:
        raise ValueError("it has no checksum")
    if zlib.crc32(b"}", zlib.crc32(line[: found.start()])) != int(found[1], 16):
        raise ValueError("its checksum does not match")
