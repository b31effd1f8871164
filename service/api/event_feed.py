"""Live events for any number of followers. One task polls the database for all of them and encodes
each event once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import structlog

from everstep.wire import RunStatus
from service.api import streams
from service.api.answers import event_answer
from service.api.blocking import BlockingCalls
from service.api.streams import PIECE_BYTES, piece_of
from service.db.errors import DatabaseUnavailable
from service.db.events import EventStore
from service.model.rows import EventRow

logger = structlog.get_logger(__name__)

POLL_S: Final = 0.1
_RING_FRAMES: Final = 2000
_RING_BYTES: Final = 2 << 20
"""Maximum bytes of frames in memory for one run; older events are read from the database again."""
_BATCH_EVENTS: Final = 500
_BACKLOG_EVENTS: Final = 100
"""Events of a piece that is read from the database."""


@dataclass
class _Tail:
    """The newest events of one followed run."""

    head: int
    """Last seq in the database."""
    status: RunStatus
    base: int
    """The ring holds the frames after this seq."""
    ring: deque[bytes] = field(default_factory=deque)
    ring_bytes: int = 0
    followers: int = 0
    gone: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def end(self) -> int:
        """Return the last seq whose frame is in the ring."""
        return self.base + len(self.ring)

    def frames(self, after: int) -> list[bytes]:
        """Return the next frames of the ring after this seq, for one piece of a stream."""
        return piece_of(islice(self.ring, after - self.base, None))

    def extend(self, frames: Sequence[bytes]) -> None:
        self.ring.extend(frames)
        self.ring_bytes += sum(map(len, frames))
        while len(self.ring) > _RING_FRAMES or self.ring_bytes > _RING_BYTES:
            self.ring_bytes -= len(self.ring.popleft())
            self.base += 1

    def wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class EventFeed:
    """Serves the histories of runs to followers."""

    def __init__(self, events: EventStore, calls: BlockingCalls) -> None:
        self._events = events
        self._database_call = calls.database_call
        self._tails: dict[str, _Tail] = {}
        self._followed = asyncio.Event()
        self.closed = False

    async def run(self) -> None:
        """Poll for new events while there are followers, until cancelled."""
        while True:
            await self._followed.wait()
            try:
                await self.tick()
            except DatabaseUnavailable as exc:
                logger.warning("event_feed_waits", error=str(exc))
            await asyncio.sleep(POLL_S)

    async def tick(self) -> None:
        """Fetch what is new for every followed run, once."""
        # A copy: a run that is followed from now on is missing in `heads`, but was not deleted.
        tails = dict(self._tails)
        heads = await self._database_call(self._events.heads, list(tails))
        for run_id, tail in tails.items():
            if run_id not in heads:
                tail.gone = True
                tail.wake()
                continue
            head, status = heads[run_id]
            if head == tail.head and status == tail.status:
                continue
            while tail.end < head:
                page = await self._database_call(self._events.page, run_id, tail.end, _BATCH_EVENTS)
                if not page.rows:
                    break
                tail.extend([encode(row) for row in page.rows])
            tail.head, tail.status = head, RunStatus(status)
            tail.wake()

    async def follow(self, run_id: str, after: int) -> AsyncGenerator[bytes]:
        """Yield frames of the events after ``after``, then of new ones as they come, until the run
        has ended or is deleted."""
        tail = await self._attach(run_id)
        if tail is None:
            return
        try:
            while not self.closed:
                changed = tail.changed
                if after < tail.base:
                    # Nothing but the bytes is held while the client takes them in.
                    after, piece = await self._backlog(run_id, after)
                    if not piece:
                        return
                    yield piece
                elif after < tail.end:
                    frames = tail.frames(after)
                    after += len(frames)
                    piece = b"".join(frames)
                    del frames
                    yield piece
                elif tail.gone or (tail.status.terminal and tail.end >= tail.head):
                    return
                else:
                    try:
                        await asyncio.wait_for(changed.wait(), streams.HEARTBEAT_S)
                    except TimeoutError:
                        yield streams.HEARTBEAT
        finally:
            self._detach(run_id, tail)

    async def _backlog(self, run_id: str, after: int) -> tuple[int, bytes]:
        """Return the next piece from the database, after the seq of its last event; empty if there
        is none."""

        def read() -> tuple[int, bytes]:
            page = self._events.page(run_id, after, _BACKLOG_EVENTS, most_bytes=PIECE_BYTES)
            return page.rows[-1].seq if page.rows else after, b"".join(map(encode, page.rows))

        return await self._database_call(read)

    def close(self) -> None:
        """End every stream because the service stops. Clients reconnect after their last event."""
        self.closed = True
        for tail in self._tails.values():
            tail.wake()

    async def _attach(self, run_id: str) -> _Tail | None:
        """Return the run's tail, or a new one at its head if it has no follower yet; None if the
        run was deleted."""
        if run_id not in self._tails:
            heads = await self._database_call(self._events.heads, [run_id])
            if run_id not in heads:
                return None
            head, status = heads[run_id]
            # Another follower may have attached meanwhile: use its tail.
            self._tails.setdefault(run_id, _Tail(head=head, status=RunStatus(status), base=head))
        tail = self._tails[run_id]
        tail.followers += 1
        self._followed.set()
        return tail

    def _detach(self, run_id: str, tail: _Tail) -> None:
        tail.followers -= 1
        if tail.followers == 0:
            self._tails.pop(run_id, None)
        if not self._tails:
            self._followed.clear()


def encode(row: EventRow) -> bytes:
    return streams.frame(row.seq, event_answer(row).model_dump_json())
