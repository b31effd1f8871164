"""Rate limit per token: a token bucket that fills steadily, and from which each request takes
one."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from everstep.options.serve import DEFAULT_RATE_PER_S

BURST_S: Final = 2.0
"""Requests worth this many seconds may come at once."""
_MAX_TOKENS: Final = 10_000
"""Maximum number of buckets; the least recently used are dropped, and start full again."""


class RateLimit:
    """The buckets of one process.

    Args:
        rate_per_s: sustained requests per second of each token; 0 is no limit.
        monotonic: monotonic clock in seconds.
    """

    def __init__(
        self,
        rate_per_s: float = DEFAULT_RATE_PER_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate_per_s = rate_per_s
        self._burst = max(1.0, rate_per_s * BURST_S)
        self._monotonic = monotonic
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By token id: level, and when it was computed."""

    def wait_s(self, token_id: str) -> int:
        """Take one request. Return 0 if it may be served, else the whole seconds to wait."""
        if self._rate_per_s <= 0:
            return 0
        now = self._monotonic()
        level, at = self._buckets.pop(token_id, (self._burst, now))
        level = min(self._burst, level + (now - at) * self._rate_per_s)
        served = level >= 1.0
        self._buckets[token_id] = (level - 1.0 if served else level, now)
        if len(self._buckets) > _MAX_TOKENS:
            self._buckets.popitem(last=False)
        return 0 if served else max(1, math.ceil((1.0 - level) / self._rate_per_s))
