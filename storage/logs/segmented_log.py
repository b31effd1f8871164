"""A log of sealed segments, for stores where files cannot grow."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from storage.errors import CorruptFile, LogTakenOver, StorageNotFound
from storage.files.protocol import Files
from storage.logs.log_lines import BATCH_BYTES, LogCursor, LogLine, split_lines

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


def read_segments(files: Files, stem: str, cursor: LogCursor, limit: int) -> list[LogLine]:
    lines: list[LogLine] = []
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
            lines.append(LogLine(line, LogCursor(*place, cursor.num_lines + len(lines) + 1)))
        number, skip_bytes, num_bytes = number + 1, 0, num_bytes + len(data)
    return lines
