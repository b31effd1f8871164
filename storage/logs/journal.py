"""Read a submission's journal: one ordered log of events, from a cursor (docs/event-log.md)."""

from __future__ import annotations

from collections.abc import Collection

from everstep.wire.events import EventKind
from storage.errors import CorruptFile
from storage.logs.append_log import log_stamp, read_log
from storage.logs.journal_damage import Damage, not_an_event
from storage.logs.journal_line import KIND_BYTES, JournalEvent, decode
from storage.logs.line_checksum import has_checksum
from storage.logs.log_lines import LogCursor
from storage.run_dir import RunDir

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
                    is_whole = has_checksum(line.data)
                    is_wanted = wanted is None or any(
                        kind in line.data[:KIND_BYTES] for kind in wanted
                    )
                    event = decode(line, is_whole) if is_wanted or not is_whole else None
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


def may_be_cut(before: str | None, after: str) -> bool:
    """Return whether ``read_journal``, between these two cursors, may have stopped because events
    are long."""
    begin, end = LogCursor.parse(before), LogCursor.parse(after)
    if end.segment:
        return end.segment > begin.segment + 1  # a cursor does not tell the length of a segment
    return end.offset_bytes - begin.offset_bytes >= _BATCH_BYTES
