"""Whoever follows a stream: a token that is revoked, or a session that ends, ends its streams as
well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from service.db.engine import DatabaseUnavailable

if TYPE_CHECKING:
    from service.api.auth import Principal
    from service.api.context import ApiContext

logger = structlog.get_logger(__name__)

CONFIRM_S: Final = 2.0
"""Between two questions to the database, each about all who follow; an idle service asks
nothing."""


@dataclass(eq=False)
class _Follower:
    caller: Principal
    refused: bool = False


class Followers:
    """Those whose streams are open on this replica. ``run`` confirms them for as long as there are
    any."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._followers: set[_Follower] = set()
        self._any = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Streams that are open now."""
        return len(self._followers)

    async def confirmed(
        self, caller: Principal, chunks: AsyncGenerator[bytes]
    ) -> AsyncGenerator[bytes]:
        """Yield a stream's chunks until the caller's token or session is found to have ended."""
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
        """Confirm whoever follows, again and again; ends by cancellation."""
        while True:
            await self._any.wait()
            await asyncio.sleep(CONFIRM_S)
            try:
                await self.confirm()
            except DatabaseUnavailable as exc:  # nor does the feed have news then
                logger.warning("who follows streams is confirmed later", problem=str(exc))

    async def confirm(self) -> None:
        """Look once whether those who follow still may. Raises DatabaseUnavailable."""
        context = self._context
        for by_session, still_valid in (
            (False, context.tokens.still_valid),
            (True, context.sessions.still_valid),
        ):
            asked = [each for each in self._followers if each.caller.by_session is by_session]
            if not asked:
                continue
            valid = await context.database_call(still_valid, {each.caller.sha256 for each in asked})
            for each in asked:
                each.refused = each.caller.sha256 not in valid
