"""The messages between the journal and its clients.

Events are sent at least once and written exactly once. A client numbers the events of a batch, and
sends the batch until it is acknowledged. The journal drops events that it already has from the same
source, even after its writer was killed and restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.wire.events import EventKind
from storage.run_control import DrillOrder, ProfileOrder, StackOrder, Stop
from train_fn.recovery.progress import Progress


@dataclass(frozen=True)
class SourceEvent:
    """One event with its number at the source. ``at`` is in Unix seconds by the head's clock, as
    estimated by the source."""

    source_n: int
    at: float
    kind: EventKind
    attempt: int
    data: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """The journal's response to a delivery."""

    acknowledged: int
    """Last ``source_n`` of this source that is durable."""
    stop: Stop | None
    progress: Progress
    profile: ProfileOrder | None = None
    """The newest profile request that the driver has sent."""
    flip: DrillOrder | None = None
    """The newest drill that a rank carries out on itself."""
    stacks: StackOrder | None = None
    """The newest request for the ranks' stacks that the driver has sent."""
    at: float = field(default_factory=time.time)
    """Time of the reply, in Unix seconds by the journal's clock."""


Deliver = Callable[[str, Sequence[SourceEvent], Stop | None], Reply]
"""Sends a source's events, and the user's stop request, to the journal. Raises if it is unknown
whether they arrived."""
