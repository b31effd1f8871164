"""What was answered about runs that have ended: such an answer is written once, however often a list of runs has it.

Answers are much alike, so that each is kept as what it does not share with an earlier one: a tenth of it, on the whole.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from typing import Final

from service.db.rows import RunHead

MOST_BYTES: Final = 48 << 20
_OVERHEAD_BYTES: Final = 300
"""What an answer takes beside its text."""
_WBITS: Final = -13
"""No header, and a window of 8 kB, which is more than two answers."""


class _Packed:
    """An answer beside an example of one."""

    __slots__ = ("_example", "data")

    def __init__(self, answer: bytes, example: bytes) -> None:
        self._example = example
        packer = zlib.compressobj(1, wbits=_WBITS, zdict=example)
        self.data = packer.compress(answer) + packer.flush()

    def answer(self) -> bytes:
        return zlib.decompressobj(_WBITS, zdict=self._example).decompress(self.data)


class KeptAnswers:
    """JSON of runs by id, each for one version of its row. Those that were not asked for longest make room. Any thread may ask."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, tuple[int, object, _Packed]] = OrderedDict()
        self._example = b""

    def get(self, run: RunHead, about: object) -> bytes | None:
        """The answer, where the run has not changed since, nor ``about``: what else the answer tells of."""
        with self._lock:
            found = self._answers.get(run.id)
            if found is None or found[0] != run.row_version or found[1] != about:
                return None
            self._answers.move_to_end(run.id)
        return found[2].answer()

    def keep(self, run: RunHead, about: object, answer: bytes) -> None:
        self._example = self._example or answer
        packed = _Packed(answer, self._example)
        with self._lock:
            self._forget(run.id)
            self._answers[run.id] = (run.row_version, about, packed)
            self._num_bytes += len(packed.data) + _OVERHEAD_BYTES
            while self._num_bytes > self._most_bytes:
                self._forget(next(iter(self._answers)))

    def _forget(self, run_id: str) -> None:
        gone = self._answers.pop(run_id, None)
        if gone is not None:
            self._num_bytes -= len(gone[2].data) + _OVERHEAD_BYTES
