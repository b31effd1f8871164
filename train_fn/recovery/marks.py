"""The nodes that the service marked, read now and then, so that a storage that hangs or fails holds nothing up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from storage.filesystem import Storage
from storage.node_marks import NodeMark, read_node_marks

logger = logging.getLogger(__name__)

READ_INTERVAL_S = 1.0
WAIT_S = 0.25
"""How long the answer of a storage is waited for; one that comes later counts at the next look."""
FIRST_WAIT_S = 5.0
"""The same before anything is known: the first ranks should not start on a marked node only because storage was slow."""


class MarksReader:
    """The last known marks. Safe to use from several threads; one read is under way at a time, in a thread of its own.

    Args:
        storage: The root of all runs.
        clock: Monotonic seconds.
    """

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._clock = clock
        self._lock = threading.Lock()
        self._asked_at = float("-inf")
        self._reading: threading.Thread | None = None
        self._marks: Mapping[str, NodeMark] | None = None
        self._problem: str | None = None

    def ask(self) -> None:
        """Begin to read, unless the last read is younger than a second or still under way."""
        with self._lock:
            now = self._clock()
            if now - self._asked_at < READ_INTERVAL_S or (self._reading is not None and self._reading.is_alive()):
                return
            self._asked_at = now
            self._reading = threading.Thread(target=self._read, name="node-marks", daemon=True)
            self._reading.start()

    def marks(self) -> Mapping[str, NodeMark]:
        """Marks by node id: those that were asked for, where they come in time, else the last known. Never raises."""
        self.ask()
        with self._lock:
            reading = self._reading
            left_s = self._asked_at + (FIRST_WAIT_S if self._marks is None else WAIT_S) - self._clock()
        if reading is not None and left_s > 0:
            reading.join(left_s)
        return self._marks if self._marks is not None else MappingProxyType({})

    def _read(self) -> None:
        try:
            self._marks, problem = read_node_marks(self._storage), None
        except Exception as exc:  # whatever it is, the last known marks serve better than none
            problem = str(exc)
        if problem is not None and self._problem is None:
            logger.warning("which nodes are cordoned or draining cannot be read; the last known marks count: %s", problem)
        self._problem = problem
