"""The last events that a rank reported. They travel with its state, since the rank that tells the
journal may die before it has."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from everstep.wire.events import EventKind

NUM_POINTS = 64
"""Metrics of so many steps."""
NUM_OTHERS = 16
"""Ends of epochs, evaluations and the like. Apart from the metrics: short steps must not push out
what is told once an epoch."""
_METRICS_KIND = EventKind.METRICS.value


class EventTail:
    """Entries are ``{"kind": …, "at": unix seconds, "data": …}``, JSON all of it."""

    def __init__(self, entries: list[dict[str, Any]] | None = None) -> None:
        self.points: deque[dict[str, Any]] = deque(maxlen=NUM_POINTS)
        """Those of metrics. Every step appends one."""
        self.others: deque[dict[str, Any]] = deque(maxlen=NUM_OTHERS)
        for entry in entries or ():
            (self.points if entry["kind"] == _METRICS_KIND else self.others).append(entry)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """By time."""
        return iter(sorted((*self.points, *self.others), key=itemgetter("at")))

    def dump(self) -> str:
        """As one value: as many small ones as these take a boundary's copy a millisecond."""
        return json.dumps([*self.points, *self.others])
