"""Types that both forms of a log share: cursors, lines and the writer's interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from storage.errors import InvalidStorage

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
class LogLine:
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
