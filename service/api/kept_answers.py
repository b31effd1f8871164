"""A cache of the JSON of runs that have ended, which many lists contain."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from service.model.run_rows import RunHead

MOST_BYTES: Final = 96 << 20
"""Enough for some 60,000 runs."""
_OVERHEAD_BYTES: Final = 300
"""Memory per entry in addition to its text."""


class KeptAnswers:
    """JSON of runs by id, for one version of their row. Least recently used ones are evicted.
    Thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, tuple[int, object, bytes]] = OrderedDict()

    def get(self, run: RunHead, about: object) -> bytes | None:
        """Return the cached JSON if neither the row version nor ``about`` has changed."""
        with self._lock:
            found = self._answers.get(run.id)
            if found is None or found[0] != run.row_version or found[1] != about:
                return None
            self._answers.move_to_end(run.id)
        return found[2]

    def keep(self, run: RunHead, about: object, answer: bytes) -> None:
        with self._lock:
            self._forget(run.id)
            self._answers[run.id] = (run.row_version, about, answer)
            self._num_bytes += len(answer) + _OVERHEAD_BYTES
            while self._num_bytes > self._most_bytes:
                self._forget(next(iter(self._answers)))

    def _forget(self, run_id: str) -> None:
        gone = self._answers.pop(run_id, None)
        if gone is not None:
            self._num_bytes -= len(gone[2]) + _OVERHEAD_BYTES
