"""A driver's process, as others on its node see it."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


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
        """Whether it still runs, or is only stopped. One that has ended and was not waited for is dead."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.began_at and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
