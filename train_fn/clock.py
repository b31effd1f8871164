"""The time of day by the clock of the run's head, on every host: a host whose clock is wrong tells
of things when they happened.

The journal says with every reply what its clock shows. Where that differs from this host's by more
than a quick reply, and clocks that NTP keeps, explain, this process tells times by the journal's
clock.
"""

from __future__ import annotations

import time

TOLERATED_S = 1.0
"""A difference of less than this is left: it may be the network's."""
QUICK_S = 1.0
"""A reply that took longer says nothing about clocks: half of it is how wrong it may be."""

_ahead_s = 0.0


def learn(asked_at: float, head_at: float, answered_at: float) -> None:
    """Take what the head's clock showed (``head_at``) between two moments of this host's own; all
    in unix seconds."""
    global _ahead_s
    if 0.0 <= answered_at - asked_at <= QUICK_S:
        ahead_s = (asked_at + answered_at) / 2 - head_at
        _ahead_s = ahead_s if abs(ahead_s) > TOLERATED_S else 0.0


def now() -> float:
    """Unix seconds, by the head's clock as far as that is known."""
    return time.time() - _ahead_s


def time_of(monotonic: float) -> float:
    """The same of a moment of ``time.monotonic``."""
    return now() - (time.monotonic() - monotonic)
