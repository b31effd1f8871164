"""How many requests a token may make: a bucket that fills steadily, and from which each request
takes one."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from everstep.options.serve import DEFAULT_RATE_PER_S

BURST_S: Final = 2.0
"""So many seconds' worth of requests may come at once."""
_MAX_TOKENS: Final = 10_000
"""Buckets that are held; of more tokens, those that were silent longest begin with a full one
again."""


class RateLimit:
    """The buckets of one process.

    Args:
        rate_per_s: Requests a second that each token may make for ever; 0 is no limit.
        monotonic: Seconds that never go back.
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
        """By token id: what is in it, and when that was."""

    def wait_s(self, token_id: str) -> int:
        """Take one request. 0 where it may be served, else whole seconds after which the next one
        will be."""
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
