"""A log that is one growing file, for filesystems that can append."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from storage.errors import (
    CorruptFile,
    InvalidStorage,
    LogTakenOver,
    StorageError,
    StorageNotFound,
    mapped,
)
from storage.files.local import write_all
from storage.files.protocol import Files, open_regular

_BLOCK_BYTES = 1 << 20


def end_of_file(files: Files, relpath: str, num_bytes: int) -> list[bytes]:
    with mapped("access", files.path(relpath)):
        start = max(0, Path(files.path(relpath)).lstat().st_size - num_bytes)
    parts, left_bytes = [], num_bytes + _BLOCK_BYTES  # it may grow meanwhile
    with files.open_read(relpath, start) as stream, mapped("read", files.path(relpath)):
        while left_bytes > 0 and (block := stream.read(min(_BLOCK_BYTES, left_bytes))):
            parts.append(block)
            left_bytes -= len(block)
    return split_lines(b"".join(parts))[1 if start else 0 :]


class AppendedLog:
    """Writes a growing file."""

    mark_every_bytes = _BLOCK_BYTES

    def __init__(self, files: Files, stem: str, *, durable: bool) -> None:
        relpath = f"{stem}.jsonl"
        parent = str(Path(relpath).parent)
        self._path = files.path(relpath)
        self._durable = durable
        files.make_dir(parent)
        with mapped("open", self._path):
            self._fd = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            try:
                self._size_bytes = _end_of_last_line(self._fd)
                os.ftruncate(self._fd, self._size_bytes)
                os.fsync(self._fd)  # also lines that the last writer did not sync before it died
            except BaseException:
                self.close()
                raise
        files.sync_dir(parent)

    def append(self, lines: Sequence[bytes]) -> None:
        data = b"".join(line + b"\n" for line in lines)
        with mapped("append to", self._path):
            found = os.fstat(self._fd).st_size
            if found != self._size_bytes:
                raise LogTakenOver(
                    f"{self._path} has {found} bytes instead of this writer's "
                    f"{self._size_bytes}: another process writes it; stop one of the two"
                )
            write_all(self._fd, data)
            if self._durable:
                os.fdatasync(self._fd)
        self._size_bytes += len(data)

    @property
    def place(self) -> int:
        return self._size_bytes

    def arrived(self, place: int, lines: Sequence[bytes]) -> int:
        ends = accumulate(len(line) + 1 for line in lines)
        return sum(place + end <= self._size_bytes for end in ends)

    def tail(self, is_mark: Callable[[bytes], bool]) -> list[bytes]:
        with mapped("read", self._path):
            start, data, step_bytes = self._size_bytes, b"", _BLOCK_BYTES
            while True:
                end, start = start, max(0, start - step_bytes)
                data = _read_between(self._fd, start, end) + data
                # twice as far back each time, so that copying stays linear
                step_bytes = len(data)
                # Unless this is the start of the file, the first line may be incomplete.
                lines = split_lines(data)[1 if start else 0 :]
                marks = [index for index, line in enumerate(lines) if is_mark(line)]
                if marks or not start:
                    return lines[marks[-1] :] if marks else lines

    def cut(self, num_bytes: int) -> None:
        with mapped("cut", self._path):
            os.ftruncate(self._fd, self._size_bytes - num_bytes)
            os.fsync(self._fd)
        self._size_bytes -= num_bytes

    def close(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        with mapped("close", self._path):
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _read_between(fd: int, start: int, end: int) -> bytes:
    blocks = []
    while start < end and (block := os.pread(fd, min(_BLOCK_BYTES, end - start), start)):
        blocks.append(block)
        start += len(block)
    return b"".join(blocks)


def _end_of_last_line(fd: int) -> int:
    """Return the size in bytes of the file's complete lines."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_appended(files: Files, stem: str, cursor: LogCursor, limit: int) -> list[TimedLine]:
    relpath = f"{stem}.jsonl"
    try:
        if cursor.offset_bytes == 0:
            return _lines_from(files, relpath, cursor, limit)
        # Check the newline before the cursor. If it is missing, the machine crashed and lost lines
        # that were read but not yet synced. The cursor's offset is then invalid; its line count
        # is not.
        with (
            files.open_read(relpath, cursor.offset_bytes - 1) as stream,
            mapped("read", files.path(relpath)),
        ):
            intact = stream.read(1) == b"\n"
        if intact:
            return _lines_from(files, relpath, cursor, limit)
        return _lines_from(files, relpath, LogCursor(), cursor.num_lines + limit)[
            cursor.num_lines :
        ]
    except StorageNotFound:
        return []


def _lines_from(files: Files, relpath: str, cursor: LogCursor, limit: int) -> list[TimedLine]:
    lines: list[TimedLine] = []
    offset, begun, begun_bytes = cursor.offset_bytes, list[bytes](), 0
    with files.open_read(relpath, offset) as stream, mapped("read", files.path(relpath)):
        while (
            len(lines) < limit
            and offset - cursor.offset_bytes < BATCH_BYTES
            and (block := stream.read(_BLOCK_BYTES))
        ):
            first, newline, rest = block.partition(b"\n")
            # joined once, at the line's end, so that copying stays linear
            begun.append(first)
            begun_bytes += len(first)
            if begun_bytes > MAX_LINE_BYTES:
                if lines:
                    break  # return what comes before it first
                where = f"line {cursor.num_lines + 1} of {files.path(relpath)}"
                raise CorruptFile(
                    f"{where} is longer than the limit of {MAX_LINE_BYTES} bytes: it is damaged"
                )
            if not newline:
                continue
            *complete, last = rest.split(b"\n")
            for data in [b"".join(begun), *complete][: limit - len(lines)]:
                offset += len(data) + 1
                lines.append(
                    TimedLine(data, LogCursor(0, offset, cursor.num_lines + len(lines) + 1))
                )
            begun, begun_bytes = [last], len(last)
    return lines


# ---------------------------------------------------------------- segmented log

# A log of sealed segments, for stores where files cannot grow.

FIRST_SEGMENT = 1
_SEGMENT = re.compile(r"([0-9]{6,9})\.jsonl")


MAX_SEGMENT_BYTES = 64 << 20
"""Maximum size of a segment."""


def last_segments(files: Files, stem: str, num_bytes: int) -> list[bytes]:
    lines: list[bytes] = []
    numbers = sorted(
        int(match[1]) for entry in files.list(stem) if (match := _SEGMENT.fullmatch(entry.name))
    )
    for number in reversed(numbers):
        lines = split_lines(files.read(_segment(stem, number), MAX_SEGMENT_BYTES)) + lines
        if sum(map(len, lines)) >= num_bytes:
            break
    return lines


class SegmentedLog:
    """Writes sealed segments, one per append."""

    mark_every_bytes = 0

    def __init__(self, files: Files, stem: str) -> None:
        self._files = files
        self._stem = stem
        self._next = _first_missing(lambda number: files.exists(_segment(stem, number)))

    def append(self, lines: Sequence[bytes]) -> None:
        relpath = _segment(self._stem, self._next)
        # A conditional put: of two writers of the same segment, one fails.
        if not self._files.create_new(relpath, b"".join(line + b"\n" for line in lines)):
            raise LogTakenOver(
                f"{self._files.path(relpath)} exists: another process writes this log; stop one of "
                "the two"
            )
        self._next += 1

    @property
    def place(self) -> int:
        return self._next

    def arrived(self, place: int, lines: Sequence[bytes]) -> int:
        return len(lines) if self._next > place else 0

    def tail(self, is_mark: Callable[[bytes], bool]) -> list[bytes]:
        lines: list[bytes] = []
        for number in range(self._next - 1, FIRST_SEGMENT - 1, -1):
            data = self._files.read(_segment(self._stem, number), MAX_SEGMENT_BYTES)
            lines = split_lines(data) + lines
            marks = [index for index, line in enumerate(lines) if is_mark(line)]
            if marks:
                return lines[marks[-1] :]
        return lines

    def cut(self, num_bytes: int) -> None:
        raise CorruptFile(
            f"the last {num_bytes} bytes of {self._files.path(self._stem)} are not JSON lines; "
            "delete its last segment"
        )

    def close(self) -> None:
        """Do nothing: every segment was sealed when it was written."""


def _segment(stem: str, number: int) -> str:
    return f"{stem}/{number:06d}.jsonl"


def _first_missing(exists: Callable[[int], bool]) -> int:
    """Return the first number from FIRST_SEGMENT that does not exist, by doubling, then bisection.
    Numbers have no gaps."""
    if not exists(FIRST_SEGMENT):
        return FIRST_SEGMENT
    low, high = FIRST_SEGMENT, FIRST_SEGMENT * 2
    while exists(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle) else (low, middle)
    return high


def read_segments(files: Files, stem: str, cursor: LogCursor, limit: int) -> list[TimedLine]:
    lines: list[TimedLine] = []
    number, skip_bytes, num_bytes = max(cursor.segment, FIRST_SEGMENT), cursor.offset_bytes, 0
    while len(lines) < limit and num_bytes < BATCH_BYTES:
        try:
            data = files.read(_segment(stem, number), MAX_SEGMENT_BYTES)
        except StorageNotFound:
            break
        if not data.endswith(b"\n"):
            if lines:
                break  # return what comes before it first
            raise CorruptFile(
                f"{files.path(_segment(stem, number))} does not end in a newline: it is damaged"
            )
        offset = skip_bytes
        for line in data[skip_bytes:].split(b"\n")[:-1][: limit - len(lines)]:
            offset += len(line) + 1
            # After a segment's last line, continue with the next segment.
            place = (number + 1, 0) if offset == len(data) else (number, offset)
            lines.append(TimedLine(line, LogCursor(*place, cursor.num_lines + len(lines) + 1)))
        number, skip_bytes, num_bytes = number + 1, 0, num_bytes + len(data)
    return lines


# ---------------------------------------------------------------- append log

# An append-only log of JSON lines, in two forms with one interface.
#
# If the filesystem can append, ``STEM.jsonl`` grows. Otherwise ``STEM/000001.jsonl``,
# ``STEM/000002.jsonl`` … are sealed segments with consecutive names, so a reader opens the next
# name and never lists. A log has one writer at a time; a writer that finds lines of another one
# stops with LogTakenOver.


def open_log(files: Files, stem: str, *, durable: bool) -> LogWriter:
    """Open a log to continue it, or create it. A torn last line of a dead writer is cut off.

    Args:
        durable: append() returns only once the lines survive a crash of the machine. Always true on
            object stores.
    """
    return (
        AppendedLog(files, stem, durable=durable) if files.can_append else SegmentedLog(files, stem)
    )


def read_log(files: Files, stem: str, cursor: LogCursor, limit: int) -> list[TimedLine]:
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


# ---------------------------------------------------------------- log lines

# Types that both forms of a log share: cursors, lines and the writer's interface.

MAX_LINE_BYTES = 8 << 20
"""Maximum length of a line. A longer one is damage: no writer writes it."""
BATCH_BYTES = 32 << 20
"""About how much of a log one call reads, whatever its limit of lines."""


@dataclass(frozen=True, order=True)
class LogCursor:
    """The position after a line: segment (0 in a growing file), byte in it, and number of lines
    before it in all segments."""

    segment: int = 0
    offset_bytes: int = 0
    num_lines: int = 0

    def __str__(self) -> str:
        return f"{self.segment}:{self.offset_bytes}:{self.num_lines}"

    @staticmethod
    def parse(text: str | None) -> LogCursor:
        """Parse a cursor from ``str``; None is the start. Raises InvalidStorage."""
        if text is None:
            return LogCursor()
        parts = text.split(":")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
            raise InvalidStorage(f"log cursor {text!r} is invalid; start again without a cursor")
        return LogCursor(*map(int, parts))


@dataclass(frozen=True)
class TimedLine:
    """One complete line without its newline, and the cursor after it."""

    data: bytes
    end: LogCursor


class LogWriter(Protocol):
    """The interface of a log's writer."""

    mark_every_bytes: int
    """How much may be written between two marks so that ``tail`` stays cheap; 0 for a mark in every
    append."""

    @property
    def place(self) -> int:
        """Return where the log ends now, for ``arrived``."""

    def append(self, lines: Sequence[bytes]) -> None:
        """Write lines, passed without newlines, in one call. After an error any part may be
        written: open the log again."""

    def arrived(self, place: int, lines: Sequence[bytes]) -> int:
        """Return how many of ``lines`` were written, after appending them at ``place`` failed and
        the log was opened again."""

    def tail(self, is_mark: Callable[[bytes], bool]) -> list[bytes]:
        """Return the complete lines from the newest mark on, or all if there is no mark."""

    def cut(self, num_bytes: int) -> None:
        """Remove the last bytes, which a crash of the machine damaged. Raises CorruptFile if that
        is not possible."""

    def close(self) -> None: ...


def split_lines(data: bytes) -> list[bytes]:
    """Return complete lines. bytes.splitlines() would also split at carriage returns."""
    return data.split(b"\n")[:-1]
