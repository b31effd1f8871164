"""A driver's process, as others on its node see it."""

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
    """Process id, and when the process began (unix seconds): ids are given out again."""

    pid: int
    began_at: float

    @classmethod
    def own(cls) -> DriverProcess:
        """This very process."""
        process = psutil.Process()
        return cls(process.pid, process.create_time())

    def is_alive(self) -> bool:
        """Whether it still runs, or is only stopped. One that has ended and was not waited for is
        dead."""
        try:
            process = psutil.Process(self.pid)
            return (
                process.create_time() == self.began_at and process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return False

    def wait(self) -> None:
        """Return once it has ended. On Linux nothing wakes up until then."""
        with suppress(AttributeError, OSError):  # another system; or it has ended
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
