"""Server-sent events: frames, the resumption header, and the answer that carries them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from fastapi import Request
from fastapi.responses import StreamingResponse

from service.problems import invalid_request

MEDIA_TYPE: Final = "text/event-stream"
HEARTBEAT_S: Final = 5.0
HEARTBEAT: Final = b": heartbeat\n\n"
"""A comment: proxies and clients see that the stream lives, and a client that went away is noticed."""


def frame(event_id: int, json_data: str) -> bytes:
    """One event; ``json_data`` has no line breaks, as JSON without indentation never has."""
    return f"id: {event_id}\ndata: {json_data}\n\n".encode()


def wanted(request: Request) -> bool:
    """Whether the client asks for a stream."""
    return MEDIA_TYPE in request.headers.get("accept", "")


def resume_after(request: Request, after: int) -> int:
    """Position to go on from: ``Last-Event-ID`` of a client that reconnects, else ``after``. Raises 422."""
    header = request.headers.get("last-event-id", "").strip()
    if not header:
        return after
    if not (header.isascii() and header.isdigit() and len(header) <= 18):
        raise invalid_request("Last-Event-ID", msg=f"{header[:40]!r} is not the id of an event of this stream")
    return int(header)


def response(frames: AsyncIterator[bytes]) -> StreamingResponse:
    return StreamingResponse(frames, media_type=MEDIA_TYPE, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
