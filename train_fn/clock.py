"""The time of day by the clock of the run's head, so that a host with a wrong clock reports right
times.

Every reply of the journal carries its time. If it differs from this host's clock by more than the
reply's duration and NTP's error explain, this process uses the journal's time.
"""

from __future__ import annotations

import time

TOLERATED_S = 1.0
"""Smaller differences are ignored: they may come from the network."""
QUICK_S = 1.0
"""Slower replies are ignored: the error of the time is half a reply's duration."""

_ahead_s = 0.0


def learn(asked_at: float, head_at: float, answered_at: float) -> None:
    """Compare the head's clock (``head_at``) with this host's before and after the call. All times
    are unix seconds."""
    global _ahead_s
    if 0.0 <= answered_at - asked_at <= QUICK_S:
        ahead_s = (asked_at + answered_at) / 2 - head_at
        _ahead_s = ahead_s if abs(ahead_s) > TOLERATED_S else 0.0


def now() -> float:
    """Return unix seconds by the head's clock, as far as it is known."""
    return time.time() - _ahead_s


def time_of(monotonic: float) -> float:
    """Return unix seconds by the head's clock for a value of ``time.monotonic``."""
    return now() - (time.monotonic() - monotonic)
