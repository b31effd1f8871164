"""Files as streamed responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from fastapi.responses import StreamingResponse
from starlette.concurrency import iterate_in_threadpool

if TYPE_CHECKING:
    from service.api.auth import Principal
    from service.api.context import ApiContext


def begun(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Return the same blocks, with the first already read: a missing file then becomes an error
    response, not a broken download."""
    return chain((next(blocks, b""),), blocks)


def download(
    context: ApiContext,
    caller: Principal,
    blocks: Iterator[bytes],
    media_type: str,
    headers: Mapping[str, str] | None = None,
    status: int = 200,
) -> StreamingResponse:
    """Return the blocks as a response that ends when the caller's token or session does."""
    confirmed = context.followers.confirmed(caller, _in_threads(blocks))
    return StreamingResponse(confirmed, status, headers, media_type)


async def _in_threads(blocks: Iterator[bytes]) -> AsyncGenerator[bytes]:
    async for block in iterate_in_threadpool(blocks):
        yield block
