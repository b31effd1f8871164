"""The client's clock, as one object that tests replace."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """A clock, a sleep function and a source of jitter."""

    now: Callable[[], float] = time.monotonic
    """Return seconds since some fixed time."""
    sleep: Callable[[float], None] = time.sleep
    """Sleep for so many seconds."""
    jitter: Callable[[], float] = random.random
    """Return a number in [0, 1), which spreads the retries of many clients."""

    def backoff_s(self, failures: int, first_s: float = 0.2, most_s: float = 5.0) -> float:
        """Return the seconds to wait after the n-th consecutive failure: exponential, capped, with
        jitter between half and all of it."""
        whole = min(most_s, first_s * 2.0 ** min(failures - 1, 30))
        return whole * (0.5 + 0.5 * self.jitter())
