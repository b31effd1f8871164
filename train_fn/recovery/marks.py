"""What the service tells drivers by small files, read now and then, so that a storage that hangs or
fails holds nothing up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from storage.cluster.node_marks import NodeMark, read_node_marks
from storage.filesystem import Storage
from storage.run_dir import RunDir

logger = logging.getLogger(__name__)

T = TypeVar("T")

READ_INTERVAL_S = 1.0
WAIT_S = 0.25
"""How long the answer of a storage is waited for; one that comes later counts at the next look."""
FIRST_WAIT_S = 5.0
"""The same before anything is known: the first ranks should not start on a marked node only because
storage was slow."""


class LastKnown(Generic[T]):
    """The last known content of a file. Safe to use from several threads; one read is under way at
    a time, in a thread of its own.

    Args:
        read: Reads the file.
        unknown: What counts before it was read for the first time.
        what: What it tells, for the log.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        read: Callable[[], T],
        unknown: T,
        what: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_file = read
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._asked_at = float("-inf")
        self._reading: threading.Thread | None = None
        self._value = unknown
        self._is_known = False
        self._problem: str | None = None

    def ask(self) -> None:
        """Begin to read, unless the last read is younger than a second or still under way."""
        with self._lock:
            now = self._clock()
            if now - self._asked_at < READ_INTERVAL_S or (
                self._reading is not None and self._reading.is_alive()
            ):
                return
            self._asked_at = now
            self._reading = threading.Thread(target=self._read, name="control-files", daemon=True)
            self._reading.start()

    def value(self) -> T:
        """What was asked for, where it comes in time, else the last known. Never raises."""
        self.ask()
        with self._lock:
            reading = self._reading
            left_s = self._asked_at + (WAIT_S if self._is_known else FIRST_WAIT_S) - self._clock()
        if reading is not None and left_s > 0:
            reading.join(left_s)
        return self._value

    def _read(self) -> None:
        try:
            self._value, problem = self._read_file(), None
            self._is_known = True
        except Exception as exc:  # whatever it is, the last known serves better than nothing
            problem = str(exc)
        if problem is not None and self._problem is None:
            logger.warning(
                "%s cannot be read; the last that is known counts: %s", self._what, problem
            )
        self._problem = problem


class MarksReader(LastKnown[Mapping[str, NodeMark]]):
    """The nodes that the service marked, by node id."""

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(
            lambda: read_node_marks(storage),
            MappingProxyType({}),
            "which nodes are cordoned or draining",
            clock,
        )

    marks = LastKnown.value


class WorkersLimit(LastKnown[int | None]):
    """Most ranks that the service lets a run use; None for as many as its spec asks for."""

    def __init__(
        self, run_dir: RunDir, at_start: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(run_dir.workers_limit, at_start, "how many ranks the run may use", clock)
