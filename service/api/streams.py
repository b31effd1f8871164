"""Streams of events: server-sent events, and the followers that read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Final

import structlog
from fastapi import Header, Request
from fastapi.responses import StreamingResponse

from everstep.wire import RunStatus
from service.api.answers import event_answer
from service.api.blocking import db_read
from service.api.callers import Principal
from service.api.problems import ApiProblem, invalid_request
from service.db.engine import DatabaseUnavailable
from service.db.events import EventStore
from service.db.tokens import SessionStore, TokenStore
from service.model.rows import EventRow

logger = structlog.get_logger(__name__)

CONFIRM_S: Final = 2.0
"""Seconds between checks of all followers; without followers nothing is checked."""
MOST_STREAMS: Final = 1000
"""Streams of this replica that may be open at a time."""
MOST_OF_CALLER: Final = 100
"""Streams of one user, or of a token that belongs to none."""
PIECE_BYTES: Final = 64 << 10
"""Size from which a stream sends what it has, before it fetches more. A piece holds at least one
event or line, which may be larger."""
_RETRY_AFTER_S: Final = 5


@dataclass(eq=False)
class _Follower:
    caller: Principal
    refused: bool = False


def piece_of(frames: Iterable[bytes]) -> list[bytes]:
    """Return the first frames, up to that with which they reach the size of a piece."""
    piece, num_bytes = [], 0
    for frame in frames:
        piece.append(frame)
        num_bytes += len(frame)
        if num_bytes >= PIECE_BYTES:
            break
    return piece


class Followers:
    """Followers with open streams on this replica. ``run`` confirms them while there are any."""

    def __init__(self, tokens: TokenStore, sessions: SessionStore) -> None:
        self._tokens = tokens
        self._sessions = sessions
        self._followers: set[_Follower] = set()
        self._any = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Return the number of open streams."""
        return len(self._followers)

    def require_room(self, caller: Principal) -> None:
        """Raise 429 if the caller, or all callers together, have as many streams as they may."""
        whose = caller.user_id or caller.token_id
        own = sum(
            (each.caller.user_id or each.caller.token_id) == whose for each in self._followers
        )
        if own < MOST_OF_CALLER and len(self._followers) < MOST_STREAMS:
            return
        detail = (
            f"{caller.name!r} has {own} streams and downloads open, of at most {MOST_OF_CALLER}; "
            "close some"
            if own >= MOST_OF_CALLER
            else f"all {MOST_STREAMS} streams and downloads of this service are open; try again"
        )
        headers = {"Retry-After": str(_RETRY_AFTER_S)}
        raise ApiProblem(429, "rate_limited", detail, headers=headers)

    async def confirmed(
        self, caller: Principal, chunks: AsyncGenerator[bytes]
    ) -> AsyncGenerator[bytes]:
        """Yield a stream's chunks until the caller's token or session has ended."""
        follower = _Follower(caller)
        self._followers.add(follower)
        self._any.set()
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    if follower.refused:
                        return
                    yield chunk
        finally:
            self._followers.discard(follower)
            if not self._followers:
                self._any.clear()

    async def run(self) -> None:
        """Confirm the followers every CONFIRM_S seconds, until cancelled."""
        while True:
            await self._any.wait()
            await asyncio.sleep(CONFIRM_S)
            try:
                await self.confirm()
            except DatabaseUnavailable as exc:  # the feed has no news then either
                logger.warning("confirming followers delayed", problem=str(exc))

    async def confirm(self) -> None:
        """Check once which followers' tokens and sessions are still valid. Raises
        DatabaseUnavailable."""
        for by_session, still_valid in (
            (False, self._tokens.still_valid),
            (True, self._sessions.still_valid),
        ):
            checked = [each for each in self._followers if each.caller.by_session is by_session]
            if not checked:
                continue
            valid = await db_read(still_valid, {each.caller.sha256 for each in checked})
            for each in checked:
                each.refused = each.caller.sha256 not in valid


# ---------------------------------------------------------------- sse

# Server-sent events: frames, the resumption header, and the streamed response.

MEDIA_TYPE: Final = "text/event-stream"
HEARTBEAT_S: Final = 5.0
LastEventId = Annotated[
    str | None,
    Header(
        alias="Last-Event-ID",
        description="`id` of the last event that a reconnecting client has received.",
    ),
]
_UNBUFFERED: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
HEARTBEAT: Final = b": heartbeat\n\n"
"""A comment. It shows proxies and clients that the stream is alive, and detects clients that went
away."""


def frame(event_id: int, json_data: str) -> bytes:
    """Return one event. ``json_data`` has no line breaks, like any JSON without indentation."""
    return f"id: {event_id}\ndata: {json_data}\n\n".encode()


def wanted(request: Request) -> bool:
    """Return whether the client requests a stream."""
    return MEDIA_TYPE in request.headers.get("accept", "")


def resume_after(last_event_id: str | None, after: int) -> int:
    """Return where to continue: after the last event of a reconnecting client, else ``after``.
    Raises 422."""
    if not last_event_id:
        return after
    if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) <= 18):
        raise invalid_request(
            "Last-Event-ID", msg=f"{last_event_id[:40]!r} is not the id of an event of this stream"
        )
    return int(last_event_id)


def response(
    followers: Followers,
    caller: Principal,
    pieces: AsyncGenerator[bytes],
    media_type: str = MEDIA_TYPE,
    headers: Mapping[str, str] = _UNBUFFERED,
) -> StreamingResponse:
    """Return a streamed response that ends when the caller's token or session does. Raises 429."""
    followers.require_room(caller)
    return StreamingResponse(
        followers.confirmed(caller, pieces), media_type=media_type, headers=headers
    )


# ---------------------------------------------------------------- event feed

# Live events for any number of followers. One task polls the database for all of them and encodes
# each event once.

POLL_S: Final = 0.1

_BATCH_EVENTS: Final = 500
"""Events that a poll reads at most. A follower that is further behind reads them for itself."""

_BACKLOG_EVENTS: Final = 100
"""Events of a piece that is read from the database."""


@dataclass
class _Tail:
    """What the last poll has found of one followed run."""

    head: int
    """Last seq in the database."""
    status: RunStatus
    base: int
    """Seq after which the frames begin."""
    frames: Sequence[bytes] = ()
    followers: int = 0
    gone: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def end(self) -> int:
        """Return the seq of the last frame."""
        return self.base + len(self.frames)

    def wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class EventFeed:
    """Serves the histories of runs to followers."""

    def __init__(self, events: EventStore) -> None:
        self._events = events
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
        heads = await db_read(self._events.heads, list(tails))
        for run_id, tail in tails.items():
            if run_id not in heads:
                tail.gone = True
                tail.wake()
                continue
            head, status = heads[run_id]
            if head == tail.end and status == tail.status:
                continue
            page = await db_read(self._events.page, run_id, tail.end, _BATCH_EVENTS)
            tail.base, tail.frames = tail.end, [encode(row) for row in page.rows]
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
                    frames = piece_of(islice(tail.frames, after - tail.base, None))
                    after += len(frames)
                    piece = b"".join(frames)
                    del frames
                    yield piece
                elif tail.gone or (tail.status.terminal and tail.end >= tail.head):
                    return
                else:
                    try:
                        await asyncio.wait_for(changed.wait(), HEARTBEAT_S)
                    except TimeoutError:
                        yield HEARTBEAT
        finally:
            self._detach(run_id, tail)

    async def _backlog(self, run_id: str, after: int) -> tuple[int, bytes]:
        """Return the next piece from the database, after the seq of its last event; empty if there
        is none."""

        def read() -> tuple[int, bytes]:
            page = self._events.page(run_id, after, _BACKLOG_EVENTS, most_bytes=PIECE_BYTES)
            return page.rows[-1].seq if page.rows else after, b"".join(map(encode, page.rows))

        return await db_read(read)

    def close(self) -> None:
        """End every stream because the service stops. Clients reconnect after their last event."""
        self.closed = True
        for tail in self._tails.values():
            tail.wake()

    async def _attach(self, run_id: str) -> _Tail | None:
        """Return the run's tail, or a new one at its head if it has no follower yet; None if the
        run was deleted."""
        if run_id not in self._tails:
            heads = await db_read(self._events.heads, [run_id])
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
    return frame(row.seq, event_answer(row).model_dump_json())
