"""What travels between the journal and its clients.

Events travel at least once and are written exactly once: a client numbers its events when it seals
a batch, and sends the batch until it is acknowledged. The journal drops what its source has sent
before, also after its writer was killed and came back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.wire.events import EventKind
from storage.run_control import ProfileOrder, Stop
from train_fn.recovery.progress import Progress


@dataclass(frozen=True)
class SourceEvent:
    """One event as its source numbered it. ``at`` is unix seconds by the head's clock, as far as
    the source knows it."""

    source_n: int
    at: float
    kind: EventKind
    attempt: int
    data: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """The journal's answer to a delivery."""

    acknowledged: int
    """Last ``source_n`` of this source that is durable."""
    stop: Stop | None
    progress: Progress
    profile: ProfileOrder | None = None
    """The newest order that the driver passed on."""
    at: float = field(default_factory=time.time)
    """Unix seconds by the journal's clock."""


Deliver = Callable[[str, Sequence[SourceEvent], Stop | None], Reply]
"""Sends a source's events, and the stop that the user asked for, to the journal. Raises if it is
not known whether they arrived."""
