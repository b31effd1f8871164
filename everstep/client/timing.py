"""Time as the client sees it, in one object, so that tests decide how it passes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """A clock, a way to wait, and a source of jitter."""

    now: Callable[[], float] = time.monotonic
    """Seconds since some fixed moment."""
    sleep: Callable[[float], None] = time.sleep
    """Waits so many seconds."""
    jitter: Callable[[], float] = random.random
    """A number in [0, 1): spreads the retries of many clients."""

    def backoff_s(self, failures: int, first_s: float = 0.2, most_s: float = 5.0) -> float:
        """Seconds to wait after the n-th failure in a row: doubling, capped, and between half and
        all of it."""
        whole = min(most_s, first_s * 2.0 ** min(failures - 1, 30))
        return whole * (0.5 + 0.5 * self.jitter())
