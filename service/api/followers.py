"""Followers of streams. A stream ends when its caller's token is revoked or its session ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from service.api.blocking_calls import BlockingCalls
from service.db.errors import DatabaseUnavailable
from service.db.sessions import SessionStore
from service.db.tokens import TokenStore

if TYPE_CHECKING:
    from service.api.auth import Principal

logger = structlog.get_logger(__name__)

CONFIRM_S: Final = 2.0
"""Seconds between checks of all followers; without followers nothing is checked."""


@dataclass(eq=False)
class _Follower:
    caller: Principal
    refused: bool = False


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
