"""The client of a run's journal, for driver, controller and ranks."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from everstep.wire.events import EventKind
from storage.errors import StorageError
from storage.run_control import DrillOrder, ProfileOrder, StackOrder, Stop
from storage.run_dir import RunDir
from train_fn import clock as head_clock
from train_fn.journal.follower import Deliver, Reply, SourceEvent
from train_fn.recovery.hang import AttemptProgress, Phase

MAX_POINTS = 20_000
"""Metric points that a client holds while the journal does not answer. Beyond that it drops every
second one."""
LEASE_S = 2.5
"""Seconds for which a reply proves that no newer attempt has begun. Less than the 3 s after which
the embedded cluster gives up a silent node. Rank 0 polls twice a second."""
MAX_BATCH = 500
"""Events in one delivery."""
_METRICS = EventKind.METRICS  # a look-up in the enum's class is slow

logger = logging.getLogger(__name__)


class ActorJournalClient:
    """Send events to the journal from a background thread, and keep its newest reply.

    ``emit`` and the properties never block.

    Args:
        deliver: sends a batch of events.
        source: name of the sender. A random part is added: numbers start at 1, so the journal would
            take the events of a new source with the same name for old ones.
        attempt: of the client's events.
        interval_s: longest time in seconds that an event waits here.
        beat_s: interval in seconds of polls while there are no events.
        on_superseded: called once, on the background thread, when a newer attempt has started.
    """

    def __init__(
        self,
        deliver: Deliver,
        source: str,
        attempt: int,
        *,
        interval_s: float = 0.25,
        beat_s: float = 0.5,
        on_superseded: Callable[[], None] | None = None,
    ) -> None:
        self.attempt = attempt
        self._call = deliver
        self._source = f"{source}.{secrets.token_hex(4)}"
        self._interval_s = interval_s
        self._beat_s = beat_s
        self._on_superseded = on_superseded
        self._mutex = threading.RLock()
        self._lock = threading.Condition(self._mutex)
        self._pending: deque[tuple[float, EventKind, int, dict[str, Any]]] = deque()
        self._num_points = 0
        self._sealed: list[SourceEvent] = []
        self._handed_over = 0
        self._delivered = 0
        self._source_n = 0
        self._announced: Stop | None = None
        self._reply: Reply | None = None
        self.stop_requested: Stop | None = None
        """The user's stop request, as of the journal's last reply."""
        self.profile_ordered: ProfileOrder | None = None
        """The newest profile request, for any rank and attempt."""
        self.flip_ordered: DrillOrder | None = None
        """The newest drill that flips a bit, for any rank and attempt."""
        self.stacks_ordered: StackOrder | None = None
        """The newest request for the ranks' stacks."""
        self._replied_at = 0.0
        self._asked_at = float("-inf")
        """When the last call that got a reply was made, in monotonic seconds."""
        self._num_replies = 0
        self._num_replies_taken = 0
        self._asked = False
        self._hurry = threading.Event()
        self._hurry.set()  # the first reply has the head's time
        self._is_idle = False
        """Whether the thread sleeps until the next beat unless an event comes."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"journal-{source}", daemon=True)
        self._thread.start()

    def emit(self, kind: EventKind, data: dict[str, Any], *, attempt: int | None = None) -> None:
        """Queue one event of ``attempt`` (default: the client's own). Consecutive metrics become
        one event."""
        number = self.attempt if attempt is None else attempt
        with self._mutex:  # the same lock as self._lock, which is slower
            if kind is _METRICS:
                self._num_points += len(data["points"])
                newest = self._pending[-1] if self._pending else None
                if newest is not None and newest[1] is kind and newest[2] == number:
                    newest[3]["points"].extend(data["points"])
                    if self._num_points > MAX_POINTS:
                        self._thin()
                    return
                data = {**data, "points": list(data["points"])}
            self._pending.append((head_clock.now(), kind, number, data))
            self._handed_over += 1
            if self._is_idle:
                self._hurry.set()

    @property
    def last_step(self) -> int | None:
        """Return the most steps done, as of the journal's last reply; None if unknown."""
        return self._reply.progress.last_step if self._reply else None

    @property
    def progress(self) -> AttemptProgress | None:
        """Return the progress of the newest attempt, as of the journal's last reply; None if
        unknown."""
        return self._reply.progress if self._reply else None

    @property
    def told_step(self) -> int | None:
        """Return the newest step whose metrics the journals have, as of the last reply; None if
        unknown, or if they have none."""
        return self._reply.progress.told_step if self._reply else None

    def moved_at(self, attempt: int) -> float | None:
        """Return when that attempt last advanced, as of the journal's last reply, in Unix seconds;
        None if unknown."""
        progress = self._reply.progress if self._reply else None
        return progress.moved_at if progress is not None and progress.attempt == attempt else None

    def phase(self, attempt: int) -> Phase | None:
        """Return what that attempt does, as of the journal's last reply; None if unknown."""
        progress = self._reply.progress if self._reply else None
        return progress.phase if progress is not None and progress.attempt == attempt else None

    def take_progress(self) -> AttemptProgress | None:
        """Return the progress of the newest attempt, once for each reply of the journal; None until
        the next reply."""
        with self._lock:
            if self._reply is None or self._num_replies == self._num_replies_taken:
                return None
            self._num_replies_taken = self._num_replies
            progress = self._reply.progress
            return replace(progress, quiet_s=progress.quiet_s + time.monotonic() - self._replied_at)

    def ask(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds for a new reply of the journal."""
        with self._lock:
            before = self._num_replies
            self._asked = True
            self._hurry.set()
            if not self._lock.wait_for(lambda: self._num_replies > before, timeout_s):
                logger.warning(
                    "the journal did not answer within %g s; going on with what it said before",
                    timeout_s,
                )

    def holds_lease(self, timeout_s: float) -> bool:
        """Return whether the journal has replied to a call that is at most ``LEASE_S`` old. If not,
        wait up to ``timeout_s`` seconds for a reply first.

        The time of the call counts, not of the reply: what the reply says may have changed since
        then. It is measured by this process's monotonic clock.
        """
        if time.monotonic() - self._asked_at > LEASE_S and timeout_s > 0:
            self.ask(timeout_s)
        return time.monotonic() - self._asked_at <= LEASE_S

    def announce_stop(self, stop: Stop) -> None:
        """Send the user's stop request to the journal, whose replies take it to every client. It is
        sent again with every delivery."""
        self._announced = stop
        self._hurry.set()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued events are durable. Return False after ``timeout_s`` seconds."""
        with self._lock:
            target = self._handed_over
            self._hurry.set()
            return self._lock.wait_for(lambda: self._delivered >= target, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flush, and end the background thread. Return False if events may be undelivered."""
        delivered = self.flush(timeout_s)
        self._closing = True
        self._hurry.set()
        self._thread.join(timeout=1.0)
        return delivered

    def _thin(self) -> None:
        """Drop every second metric point, so that memory stays bounded while the journal does not
        answer. The caller holds the lock."""
        points = self._pending[-1][3]["points"]
        if len(points) < 3:
            return
        logger.warning(
            "the journal does not answer; every second metric point of %d is let go", len(points)
        )
        kept = points[:-1:2] + points[-1:]
        self._num_points -= len(points) - len(kept)
        self._pending[-1][3]["points"] = kept

    def _run(self) -> None:
        last_call = float("-inf")
        failures = 0
        busy = False  # the last call had events, so more will probably follow
        while not self._closing:
            self._hurry.wait(self._pause_s(last_call, failures, busy))
            self._is_idle = False
            self._hurry.clear()
            self._seal()
            busy = bool(self._sealed)
            asked, self._asked = self._asked, False
            if (
                not asked
                and not busy
                and self._announced is None
                and time.monotonic() - last_call < self._beat_s
            ):
                self._count_delivered()
                continue
            last_call = time.monotonic()
            try:
                self._deliver()
                failures = 0
            except Exception as exc:
                failures += 1
                if failures in (1, 10):
                    logger.warning(
                        "the journal did not take %d events, sending them again: %s",
                        len(self._sealed),
                        exc,
                    )

    def _pause_s(self, last_call: float, failures: int, busy: bool) -> float:
        """Return how many seconds to wait before the next call: an interval while events come or
        calls fail, otherwise until the next beat."""
        with self._lock:
            self._is_idle = not (failures or busy or self._sealed or self._pending)
            beat_in_s = last_call + self._beat_s - time.monotonic()
            return (
                max(self._interval_s, beat_in_s)
                if self._is_idle
                else self._interval_s * min(2**failures, 16)
            )

    def _seal(self) -> None:
        """Number the next batch. It is fixed from here on, since the journal may have received it
        although no reply arrived."""
        with self._lock:
            while self._pending and len(self._sealed) < MAX_BATCH:
                at, kind, attempt, data = self._pending.popleft()
                if kind is EventKind.METRICS:
                    self._num_points -= len(data["points"])
                self._source_n += 1
                self._sealed.append(SourceEvent(self._source_n, at, kind, attempt, data))

    def _deliver(self) -> None:
        """Send the batch, and take the reply. Raises if it is unknown whether it arrived."""
        asked, asked_at, batch = time.monotonic(), time.time(), tuple(self._sealed)
        reply = self._call(self._source, batch, self._announced)
        head_clock.learn(asked_at, reply.at, time.time())
        self._sealed = [event for event in self._sealed if event.source_n > reply.acknowledged]
        self._reply, self._replied_at, self._asked_at = reply, time.monotonic(), asked
        self.stop_requested, self.profile_ordered = reply.stop, reply.profile
        self.flip_ordered, self.stacks_ordered = reply.flip, reply.stacks
        self._num_replies += 1
        self._count_delivered()
        # More may be pending. Later events wait for the interval, or each step would be a call.
        if len(batch) == MAX_BATCH:
            self._hurry.set()
        if reply.progress.attempt > self.attempt and self._on_superseded is not None:
            superseded, self._on_superseded = self._on_superseded, None
            superseded()

    def _count_delivered(self) -> None:
        with self._lock:
            self._delivered = self._handed_over - len(self._pending) - len(self._sealed)
            self._lock.notify_all()


# ---------------------------------------------------------------- profile orders

# Pass requests for profiles and stacks from the run directory to the ranks and their controller,
# each of them once. Runs in the driver.


class PassedOrders:
    """Read requests and send them to the journal: for stacks, of which its replies tell the
    controller, and for profiles, of which they tell every rank. Not thread-safe."""

    def __init__(self, run_dir: RunDir, submission: int, journal: ActorJournalClient) -> None:
        self._ordered: dict[EventKind, Callable[[], StackOrder | ProfileOrder | None]] = {
            EventKind.STACKS_ORDERED: partial(run_dir.stacks_ordered, submission),
            EventKind.PROFILE_ORDERED: partial(run_dir.profile_ordered, submission),
        }
        self._journal = journal
        self._passed_on: dict[EventKind, str] = {}
        """Id of the newest request of each kind. Each submission has its own files, so requests for
        an older driver are never seen."""

    def tick(self) -> None:
        """Pass on the newest requests. Raise StorageError if one cannot be read; the next tick
        retries."""
        problem: StorageError | None = None
        for kind, ordered in self._ordered.items():
            try:
                order = ordered()
            except StorageError as exc:
                problem = exc
                continue
            if order is not None and order.id != self._passed_on.get(kind):
                self._passed_on[kind] = order.id
                data = asdict(order)
                attempt = data.pop("attempt")
                self._journal.emit(kind, data, attempt=attempt)
        if problem is not None:
            raise problem
