"""A log that is one growing file, for filesystems that can append."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

from storage.errors import CorruptFile, LogTakenOver, StorageNotFound, mapped
from storage.files.protocol import Files
from storage.files.regular_file import open_regular
from storage.files.synced_file import write_all
from storage.logs.log_lines import BATCH_BYTES, MAX_LINE_BYTES, LogCursor, LogLine, split_lines

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


def read_appended(files: Files, stem: str, cursor: LogCursor, limit: int) -> list[LogLine]:
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


def _lines_from(files: Files, relpath: str, cursor: LogCursor, limit: int) -> list[LogLine]:
    lines: list[LogLine] = []
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
                lines.append(LogLine(data, LogCursor(0, offset, cursor.num_lines + len(lines) + 1)))
            begun, begun_bytes = [last], len(last)
    return lines
