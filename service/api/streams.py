"""Streams of events: server-sent events, and the followers that read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import structlog
from fastapi import Header, Request
from fastapi.responses import StreamingResponse

from service.api.blocking import BlockingCalls
from service.api.problems import ProblemError, invalid_request
from service.db.errors import DatabaseUnavailable
from service.db.sessions import SessionStore
from service.db.tokens import TokenStore

if TYPE_CHECKING:
    from service.api.auth import Principal
    from service.api.context import ApiContext

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

    def __init__(self, tokens: TokenStore, sessions: SessionStore, calls: BlockingCalls) -> None:
        self._tokens = tokens
        self._sessions = sessions
        self._database_call = calls.database_call
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
        raise ProblemError(429, "rate_limited", detail, headers=headers)

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
            valid = await self._database_call(still_valid, {each.caller.sha256 for each in checked})
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
    context: ApiContext, caller: Principal, frames: AsyncGenerator[bytes]
) -> StreamingResponse:
    """Return a streamed response that ends when the caller's token or session does. Raises 429."""
    context.followers.require_room(caller)
    frames = context.followers.confirmed(caller, frames)
    return StreamingResponse(
        frames,
        media_type=MEDIA_TYPE,
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )
