"""Live events for any number of followers: one task asks the database for all of them, and encodes
each event once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

import structlog

from everstep.wire import RunStatus
from service.api import sse
from service.api.answers import event_answer
from service.db.engine import DatabaseUnavailable
from service.model.rows import EventRow

if TYPE_CHECKING:
    from service.api.context import ApiContext

logger = structlog.get_logger(__name__)

POLL_S: Final = 0.1
_RING_FRAMES: Final = 2000
_RING_BYTES: Final = 16 << 20
"""What is older than the newest frames of so many bytes is asked of the database again."""
_BATCH_EVENTS: Final = 500


@dataclass
class _Tail:
    """The newest events of one run that somebody follows."""

    head: int
    """Last seq that is in the database."""
    status: RunStatus
    base: int
    """Frames of the seqs behind it are in the ring."""
    ring: deque[bytes] = field(default_factory=deque)
    ring_bytes: int = 0
    followers: int = 0
    gone: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def end(self) -> int:
        """Last seq whose frame is in the ring."""
        return self.base + len(self.ring)

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
    """Followers of runs' histories."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._tails: dict[str, _Tail] = {}
        self._followed = asyncio.Event()
        self.closed = False

    async def run(self) -> None:
        """Look for news as long as somebody follows; ends by cancellation."""
        while True:
            await self._followed.wait()
            try:
                await self.tick()
            except DatabaseUnavailable as exc:
                logger.warning("event_feed_waits", error=str(exc))
            await asyncio.sleep(POLL_S)

    async def tick(self) -> None:
        """Fetch what is new for every followed run, once."""
        # who comes to follow meanwhile is not asked about: that is no sign that a run is gone
        tails = dict(self._tails)
        heads = await self._context.database_call(self._context.events.heads, list(tails))
        for run_id, tail in tails.items():
            if run_id not in heads:
                tail.gone = True
                tail.wake()
                continue
            head, status = heads[run_id]
            if head == tail.head and status == tail.status:
                continue
            while tail.end < head:
                page = await self._context.database_call(
                    self._context.events.page, run_id, tail.end, _BATCH_EVENTS
                )
                if not page.rows:
                    break
                tail.extend([encode(row) for row in page.rows])
            tail.head, tail.status = head, RunStatus(status)
            tail.wake()

    async def follow(self, run_id: str, after: int) -> AsyncGenerator[bytes]:
        """Frames of every event behind ``after``, then of new ones as they come, until the run has
        ended or is deleted."""
        tail = await self._attach(run_id)
        if tail is None:
            return
        try:
            while not self.closed:
                changed = tail.changed
                if after < tail.base:
                    page = await self._context.database_call(
                        self._context.events.page, run_id, after, _BATCH_EVENTS
                    )
                    if not page.rows:
                        return
                    after = page.rows[-1].seq
                    yield b"".join(encode(row) for row in page.rows)
                elif after < tail.end:
                    frames = list(islice(tail.ring, after - tail.base, None))
                    after = tail.end
                    yield b"".join(frames)
                elif tail.gone or (tail.status.terminal and tail.end >= tail.head):
                    return
                else:
                    try:
                        await asyncio.wait_for(changed.wait(), sse.HEARTBEAT_S)
                    except TimeoutError:
                        yield sse.HEARTBEAT
        finally:
            self._detach(run_id, tail)

    def close(self) -> None:
        """End every stream; the service is going down. Clients reconnect with what they have."""
        self.closed = True
        for tail in self._tails.values():
            tail.wake()

    async def _attach(self, run_id: str) -> _Tail | None:
        """The run's tail, begun at its head where nobody follows it yet; None where the run is
        gone."""
        if run_id not in self._tails:
            heads = await self._context.database_call(self._context.events.heads, [run_id])
            if run_id not in heads:
                return None
            head, status = heads[run_id]
            # Another follower may have attached meanwhile: its tail is as good.
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
    return sse.frame(row.seq, event_answer(row).model_dump_json())
