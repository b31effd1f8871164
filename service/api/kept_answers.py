"""What was answered about runs that have ended: such an answer is written once, however often a
list of runs has it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from service.model.run_rows import RunHead

MOST_BYTES: Final = 96 << 20
"""Room for some 60,000 answers."""
_OVERHEAD_BYTES: Final = 300
"""What an answer takes beside its text."""


class KeptAnswers:
    """JSON of runs by id, each for one version of its row. Those that were not asked for longest
    make room. Any thread may ask."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, tuple[int, object, bytes]] = OrderedDict()

    def get(self, run: RunHead, about: object) -> bytes | None:
        """The answer, where the run has not changed since, nor ``about``: what else the answer
        tells of."""
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
