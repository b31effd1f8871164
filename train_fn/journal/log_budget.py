"""Limit how much a process logs, so that neither storage nor the steps pay for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

RATE_CHARS_PER_S = 1_000_000
"""Characters per second that a process may log for long."""
BURST_CHARS = 8_000_000
"""Characters that it may log at once. More is counted and dropped."""


class LogBudget:
    """A token bucket that fills at RATE_CHARS_PER_S. It counts what found it empty. Thread-safe."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._left = float(BURST_CHARS)
        self._at = monotonic()
        self._lines = 0
        self._chars = 0

    def take(self, num_chars: int, num_lines: int) -> bool:
        """Return whether this may be logged now. If not, count it as dropped."""
        with self._lock:
            now = self._monotonic()
            self._left = min(BURST_CHARS, self._left + (now - self._at) * RATE_CHARS_PER_S)
            self._at = now
            if self._left >= num_chars:
                self._left -= num_chars
                return True
            self._lines += num_lines
            self._chars += num_chars
            return False

    def count_dropped(self, num_lines: int, num_chars: int) -> None:
        """Count lines that were dropped for another reason."""
        with self._lock:
            self._lines += num_lines
            self._chars += num_chars

    def notice(self) -> str | None:
        """Return a line about what was dropped since the last notice; None if nothing was."""
        with self._lock:
            lines, chars = self._lines, self._chars
            self._lines = self._chars = 0
        if not chars:
            return None
        return (
            f"{lines} lines ({chars / 1e6:.1f} MB) are left out here: this process logs more than "
            f"{RATE_CHARS_PER_S / 1e6:g} MB/s"
        )
