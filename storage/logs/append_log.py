"""One append-only log of JSON lines, in two forms that are read alike.

Where the filesystem can append, ``STEM.jsonl`` grows. Where it cannot, ``STEM/000001.jsonl``,
``STEM/000002.jsonl`` … are sealed segments with consecutive names: a reader opens the next name and
never lists. A log has one writer at a time; a writer that finds another's lines stops with
LogTakenOver.
"""

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
from storage.files.protocol import Files
from storage.files.regular_file import open_regular

_BLOCK_BYTES = 1 << 20
FIRST_SEGMENT = 1
_SEGMENT = re.compile(r"([0-9]{6,9})\.jsonl")
MAX_LINE_BYTES = 8 << 20
"""Longest line of a log. A longer one is damage: no writer writes it."""
_BATCH_BYTES = 32 << 20
"""About how much of a log one call reads, whatever its limit of lines."""
MAX_SEGMENT_BYTES = 64 << 20
"""Largest segment of a log where files cannot grow."""


@dataclass(frozen=True, order=True)
class LogCursor:
    """The place after a line: segment (0 in a growing file), byte in it, and number of lines before
    it in all segments."""

    segment: int = 0
    offset_bytes: int = 0
    num_lines: int = 0

    def __str__(self) -> str:
        return f"{self.segment}:{self.offset_bytes}:{self.num_lines}"

    @staticmethod
    def parse(text: str | None) -> LogCursor:
        """Parse what ``str`` returned; None is the start. Raises InvalidStorage."""
        if text is None:
            return LogCursor()
        parts = text.split(":")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
            raise InvalidStorage(f"log cursor {text!r} was not made here; start again without one")
        return LogCursor(*map(int, parts))


@dataclass(frozen=True)
class LogLine:
    """One complete line without its newline, and the cursor after it."""

    data: bytes
    end: LogCursor


class LogWriter(Protocol):
    """The writing end of a log."""

    mark_every_bytes: int
    """How much may be written between two marks so that ``tail`` stays cheap; 0: a mark in every
    append."""

    @property
    def place(self) -> int:
        """Where the log ends now, for ``arrived``."""

    def append(self, lines: Sequence[bytes]) -> None:
        """Write lines, given without newlines, in one go. After an error any part of them may be
        written: open the log again."""

    def arrived(self, place: int, lines: Sequence[bytes]) -> int:
        """Return how many of ``lines`` were written, after the log was opened again because
        appending them at ``place`` failed."""

    def tail(self, is_mark: Callable[[bytes], bool]) -> list[bytes]:
        """Return the complete lines from the newest mark on, or all where there is no mark."""

    def cut(self, num_bytes: int) -> None:
        """Remove the last bytes, which a crash of the machine spoilt. Raises CorruptFile where that
        is not possible."""

    def close(self) -> None: ...


def open_log(files: Files, stem: str, *, durable: bool) -> LogWriter:
    """Open a log to continue it, or begin it. A torn last line of a dead writer is cut off.

    Args:
        durable: append() returns only once the lines survive a crash of the machine (object stores:
            always).
    """
    return (
        AppendedLog(files, stem, durable=durable) if files.can_append else SegmentedLog(files, stem)
    )


def read_log(files: Files, stem: str, cursor: LogCursor, limit: int) -> list[LogLine]:
    """Return up to ``limit`` complete lines after ``cursor``, oldest first; none at the end, or
    where there is no such log (yet).

    Raises CorruptFile for a line or a segment that is longer than any writer's.
    """
    if limit <= 0:
        return []
    return (
        _read_appended(files, stem, cursor, limit)
        if files.can_append
        else _read_segments(files, stem, cursor, limit)
    )


def log_stamp(files: Files, stem: str) -> tuple[int, int, int] | None:
    """Return a cheap stamp (inode, size, mtime) that changes whenever a growing log does; None
    where there is no such log (yet), or it does not grow.

    The file is opened for it: on NFS only that is sure to see other hosts' writes; a stat may be a
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
    """Return the complete lines in about the last ``num_bytes`` of a log, oldest first; none where
    there is no such log."""
    try:
        return (
            _end_of_file(files, f"{stem}.jsonl", num_bytes)
            if files.can_append
            else _last_segments(files, stem, num_bytes)
        )
    except StorageNotFound:
        return []


def _end_of_file(files: Files, relpath: str, num_bytes: int) -> list[bytes]:
    with mapped("look at", files.path(relpath)):
        start = max(0, Path(files.path(relpath)).lstat().st_size - num_bytes)
    parts, left_bytes = [], num_bytes + _BLOCK_BYTES  # it may grow meanwhile
    with files.open_read(relpath, start) as stream, mapped("read", files.path(relpath)):
        while left_bytes > 0 and (block := stream.read(min(_BLOCK_BYTES, left_bytes))):
            parts.append(block)
            left_bytes -= len(block)
    return _split(b"".join(parts))[1 if start else 0 :]


def _last_segments(files: Files, stem: str, num_bytes: int) -> list[bytes]:
    lines: list[bytes] = []
    numbers = sorted(
        int(match[1]) for entry in files.list(stem) if (match := _SEGMENT.fullmatch(entry.name))
    )
    for number in reversed(numbers):
        lines = _split(files.read(_segment(stem, number), MAX_SEGMENT_BYTES)) + lines
        if sum(map(len, lines)) >= num_bytes:
            break
    return lines


class AppendedLog:
    """A growing file."""

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
                os.fsync(self._fd)  # also what the last writer wrote but did not live to sync
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
                    f"{self._size_bytes}: another process writes it; end one of the two"
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
                # twice as far back each time, so that nothing is copied again and again
                step_bytes = len(data)
                # Where this does not begin the file, its first line may be the end of a longer one.
                lines = _split(data)[1 if start else 0 :]
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


class SegmentedLog:
    """Sealed segments; every append is one."""

    mark_every_bytes = 0

    def __init__(self, files: Files, stem: str) -> None:
        self._files = files
        self._stem = stem
        self._next = _first_missing(lambda number: files.exists(_segment(stem, number)))

    def append(self, lines: Sequence[bytes]) -> None:
        relpath = _segment(self._stem, self._next)
        # A conditional put: of two writers of the same segment, one learns that it exists.
        if not self._files.create_new(relpath, b"".join(line + b"\n" for line in lines)):
            raise LogTakenOver(
                f"{self._files.path(relpath)} exists: another process writes this log"
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
            lines = (
                _split(self._files.read(_segment(self._stem, number), MAX_SEGMENT_BYTES)) + lines
            )
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
        """Do nothing: every segment was sealed as it was written."""


def _split(data: bytes) -> list[bytes]:
    """Return complete lines. bytes.splitlines() would also split at carriage returns."""
    return data.split(b"\n")[:-1]


def _segment(stem: str, number: int) -> str:
    return f"{stem}/{number:06d}.jsonl"


def _first_missing(exists: Callable[[int], bool]) -> int:
    """Return the first number from FIRST_SEGMENT on that does not exist, by doubling, then halving.
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


def _read_appended(files: Files, stem: str, cursor: LogCursor, limit: int) -> list[LogLine]:
    relpath = f"{stem}.jsonl"
    try:
        if cursor.offset_bytes == 0:
            return _lines_from(files, relpath, cursor, limit)
        # Look at the newline before the cursor, too: where it is missing, the machine crashed and
        # took lines with it that were read but not yet synced. The log is then shorter, and the
        # cursor's byte means nothing; its line count does.
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


def _lines_from(files: Files, relpath: str, cursor: LogCursor, limit: int) -> list[LogLine]:
    lines: list[LogLine] = []
    offset, begun, begun_bytes = cursor.offset_bytes, list[bytes](), 0
    with files.open_read(relpath, offset) as stream, mapped("read", files.path(relpath)):
        while (
            len(lines) < limit
            and offset - cursor.offset_bytes < _BATCH_BYTES
            and (block := stream.read(_BLOCK_BYTES))
        ):
            first, newline, rest = block.partition(b"\n")
            # joined once, at the line's end: to add block to block would copy a long line again and
            # again
            begun.append(first)
            begun_bytes += len(first)
            if begun_bytes > MAX_LINE_BYTES:
                if lines:
                    break  # what comes before it first
                where = f"line {cursor.num_lines + 1} of {files.path(relpath)}"
                raise CorruptFile(
                    f"{where} is longer than {MAX_LINE_BYTES} bytes, the limit: it is damaged"
                )
            if not newline:
                continue
            *complete, last = rest.split(b"\n")
            for data in [b"".join(begun), *complete][: limit - len(lines)]:
                offset += len(data) + 1
                lines.append(LogLine(data, LogCursor(0, offset, cursor.num_lines + len(lines) + 1)))
            begun, begun_bytes = [last], len(last)
    return lines


def _read_segments(files: Files, stem: str, cursor: LogCursor, limit: int) -> list[LogLine]:
    lines: list[LogLine] = []
    number, skip_bytes, num_bytes = max(cursor.segment, FIRST_SEGMENT), cursor.offset_bytes, 0
    while len(lines) < limit and num_bytes < _BATCH_BYTES:
        try:
            data = files.read(_segment(stem, number), MAX_SEGMENT_BYTES)
        except StorageNotFound:
            break
        if not data.endswith(b"\n"):
            if lines:
                break  # what comes before it first
            raise CorruptFile(
                f"{files.path(_segment(stem, number))} does not end in a newline: it is damaged"
            )
        offset = skip_bytes
        for line in data[skip_bytes:].split(b"\n")[:-1][: limit - len(lines)]:
            offset += len(line) + 1
            # After a segment's last line the next one is asked for, not this one again.
            place = (number + 1, 0) if offset == len(data) else (number, offset)
            lines.append(LogLine(line, LogCursor(*place, cursor.num_lines + len(lines) + 1)))
        number, skip_bytes, num_bytes = number + 1, 0, num_bytes + len(data)
    return lines
