"""Read the small files by which the service directs drivers, without blocking if the storage hangs
or fails.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

import psutil

from storage.cluster import MarkedNode, read_node_marks
from storage.filesystem import Storage
from storage.run_dir import RunDir

logger = logging.getLogger(__name__)

T = TypeVar("T")

READ_INTERVAL_S = 1.0
WAIT_S = 0.25
"""How long a read is waited for. A later answer is used by the next call."""
FIRST_WAIT_S = 5.0
"""Same for the first read: ranks should not start on a marked node only because storage was
slow."""


class LastKnown(Generic[T]):
    """Caches the last known content of a file. Safe to use from several threads.

    At most one read runs at a time, in its own thread.

    Args:
        read: Reads the file.
        unknown: The value before the first read.
        what: What the file says, for the log.
        clock: Returns monotonic seconds.
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
        """Start a read, unless one is running or the last one began less than READ_INTERVAL_S
        ago."""
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
        """Return the newest value if it arrives in time, else the last known one. Never raises."""
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
        except Exception as exc:  # the last known value is better than none
            problem = str(exc)
        if problem is not None and self._problem is None:
            logger.warning(
                "cannot read %s; the last known value stays in use: %s", self._what, problem
            )
        self._problem = problem


class MarksReader(LastKnown[Mapping[str, MarkedNode]]):
    """Reads the marks that the service set on nodes, by node id."""

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(
            lambda: read_node_marks(storage),
            MappingProxyType({}),
            "which nodes are cordoned or draining",
            clock,
        )

    marks = LastKnown.value


class WorkersLimit(LastKnown[int | None]):
    """Reads how many ranks the service allows a run; None means as many as its spec asks for."""

    def __init__(
        self, run_dir: RunDir, at_start: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(run_dir.workers_limit, at_start, "how many ranks the run may use", clock)


# ---------------------------------------------------------------- driver process

# Watch a driver's process from another process on its node.

_LOOK_S = 1.0


@dataclass(frozen=True)
class DriverProcess:
    """Process id, and when the process began (unix seconds), because ids are reused."""

    pid: int
    began_at: float

    @classmethod
    def own(cls) -> DriverProcess:
        """Return the current process."""
        process = psutil.Process()
        return cls(process.pid, process.create_time())

    def is_alive(self) -> bool:
        """Return whether the process runs or is stopped. A zombie counts as dead."""
        try:
            process = psutil.Process(self.pid)
            return (
                process.create_time() == self.began_at and process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return False

    def wait(self) -> None:
        """Block until the process has ended; on Linux without polling."""
        with suppress(AttributeError, OSError):  # not Linux, or the process has ended
            pidfd = os.pidfd_open(self.pid)
            try:
                ended = select.poll()
                ended.register(pidfd, select.POLLIN)
                if self.is_alive():
                    ended.poll()
            finally:
                os.close(pidfd)
        while self.is_alive():
            time.sleep(_LOOK_S)
