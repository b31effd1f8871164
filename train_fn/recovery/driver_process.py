"""Watch a driver's process from another process on its node."""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

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
