"""Server-sent events: frames, the resumption header, and the streamed response."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated, Final

from fastapi import Header, Request
from fastapi.responses import StreamingResponse

from service.api.problems import invalid_request

if TYPE_CHECKING:
    from service.api.auth import Principal
    from service.api.context import ApiContext

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
