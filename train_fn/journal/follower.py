"""Read a run's journals in the driver while the run trains: batch by batch, from the first
submission to the current one.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.wire.events import EventKind, validation_name
from storage.errors import StorageError
from storage.logs.journal import JournalEvent, read_journal
from storage.run_control import DrillOrder, ProfileOrder, StackOrder, Stop
from storage.run_dir import RunDir
from train_fn.recovery.hang import AttemptProgress

INTERVAL_S = 10.0
"""Interval in seconds of reads. The first one waits as long, so that imports do not slow down the
start."""
_BATCH_EVENTS = 5000

logger = logging.getLogger(__name__)


class NotNow(Exception):
    """A batch could not be used now. It is passed again later."""


def measured(event: JournalEvent) -> list[tuple[int, float, dict[str, float]]]:
    """Return (step, Unix seconds, finite values by name) of each point in an event. Values of an
    evaluation have the names of their series."""
    found: list[tuple[int, float, dict[str, float | None]]] = []
    if event.kind is EventKind.METRICS:
        found = [(point["step"], point["at"], point["values"]) for point in event.data["points"]]
    elif event.kind is EventKind.EVALUATED:
        named = {validation_name(name): value for name, value in event.data["metrics"].items()}
        found = [(event.data["step"], event.at, named)]
    return [
        (step, at, {name: value for name, value in values.items() if value is not None})
        for step, at, values in found
    ]


class JournalFollower(ABC):
    """Read every journal up to this submission's, in order. A thread does so from ``start`` to
    ``close``.

    Args:
        run_dir: the run.
        submission: the current one.
        what: name of what is made, for the log.
    """

    def __init__(self, run_dir: RunDir, submission: int, what: str) -> None:
        self._run_dir = run_dir
        self._submission = submission
        self._what = what
        self._older: list[int] | None = None
        self._cursor: str | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)

    @abstractmethod
    def take(self, submission: int, events: Sequence[JournalEvent]) -> None:
        """Use the next events of a journal. Raise StorageError or NotNow to get them again."""

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Use the remaining events, but return after ``timeout_s`` seconds."""
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("%s: not complete after %g s", self._what, timeout_s)

    def update(self) -> None:
        """Use all new events. Raises StorageError and NotNow; the next call continues there."""
        if self._older is None:
            self._older = [
                submission
                for submission in self._run_dir.submissions()
                if submission < self._submission
            ]
        while self._older:
            self._follow(self._older[0])
            self._cursor = None
            self._older.pop(0)
        self._follow(self._submission)

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(max(INTERVAL_S, self._run_dir.storage.batch_s))
            try:
                self.update()
            except (StorageError, NotNow) as exc:
                logger.warning("%s: trying again: %s", self._what, exc)
            except Exception:
                logger.exception("%s: given up; training goes on without", self._what)
                return

    def _follow(self, submission: int) -> None:
        """Use the events of a submission's journal after the cursor."""
        while True:
            events, cursor = read_journal(
                self._run_dir, submission, self._cursor, _BATCH_EVENTS, past_damage=True
            )
            self.take(submission, events)
            self._cursor = cursor
            if not events:
                return


# ---------------------------------------------------------------- delivery

# The messages between the journal and its clients.
#
# Events are sent at least once and written exactly once. A client numbers the events of a batch,
# and sends the batch until it is acknowledged. The journal drops events that it already has from
# the same source, even after its writer was killed and restarted.


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
    progress: AttemptProgress
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
