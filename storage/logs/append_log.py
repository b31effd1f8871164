"""An append-only log of JSON lines, in two forms with one interface.

If the filesystem can append, ``STEM.jsonl`` grows. Otherwise ``STEM/000001.jsonl``,
``STEM/000002.jsonl`` … are sealed segments with consecutive names, so a reader opens the next name
and never lists. A log has one writer at a time; a writer that finds lines of another one stops with
LogTakenOver.
"""

from __future__ import annotations

import os

from storage.errors import StorageError, StorageNotFound
from storage.files.protocol import Files
from storage.files.regular_file import open_regular
from storage.logs.growing_log import AppendedLog, end_of_file, read_appended
from storage.logs.log_lines import LogCursor, LogLine, LogWriter
from storage.logs.segmented_log import SegmentedLog, last_segments, read_segments


def open_log(files: Files, stem: str, *, durable: bool) -> LogWriter:
    """Open a log to continue it, or create it. A torn last line of a dead writer is cut off.

    Args:
        durable: append() returns only once the lines survive a crash of the machine. Always true on
            object stores.
    """
    return (
        AppendedLog(files, stem, durable=durable) if files.can_append else SegmentedLog(files, stem)
    )


def read_log(files: Files, stem: str, cursor: LogCursor, limit: int) -> list[LogLine]:
    """Return up to ``limit`` complete lines after ``cursor``, oldest first; none at the end, or if
    the log does not exist (yet).

    Raises CorruptFile for a line or segment that is longer than any writer's.
    """
    if limit <= 0:
        return []
    return (
        read_appended(files, stem, cursor, limit)
        if files.can_append
        else read_segments(files, stem, cursor, limit)
    )


def log_stamp(files: Files, stem: str) -> tuple[int, int, int] | None:
    """Return a cheap change stamp (inode, size, mtime) of a growing log; None if it does not exist
    (yet), or has segments.

    The file is opened: on NFS only that shows other hosts' writes for certain; a stat may be a
    minute old.
    """
    if not files.can_append:
        return None
    try:
        fd = open_regular(files.path(f"{stem}.jsonl"))
    except (OSError, StorageError):
        return None
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_end(files: Files, stem: str, num_bytes: int) -> list[bytes]:
    """Return the complete lines in about the last ``num_bytes`` of a log, oldest first; none if it
    does not exist."""
    try:
        return (
            end_of_file(files, f"{stem}.jsonl", num_bytes)
            if files.can_append
            else last_segments(files, stem, num_bytes)
        )
    except StorageNotFound:
        return []
