"""When tokens were last used. Uses are collected and written every few seconds, so that reads cause
no writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from service.api.blocking_calls import BlockingCalls
from service.db.errors import DatabaseError
from service.db.tokens import TokenStore

logger = structlog.get_logger(__name__)

FLUSH_S: Final = 5.0


class TokenUse:
    """Uses that are not in the database yet. ``clock`` returns unix seconds."""

    def __init__(
        self, tokens: TokenStore, clock: Callable[[], float], calls: BlockingCalls
    ) -> None:
        self._tokens = tokens
        self._clock = clock
        self._database_call = calls.database_call
        self._used_at: dict[str, float] = {}

    def note(self, token_id: str) -> None:
        self._used_at[token_id] = self._clock()

    async def flush(self) -> None:
        """Write the collected uses. Keep them for the next flush if the database is away."""
        used_at, self._used_at = self._used_at, {}
        if not used_at:
            return
        try:
            await self._database_call(self._tokens.note_used, used_at)
        except DatabaseError as exc:
            self._used_at = used_at | self._used_at
            logger.warning("recording token use delayed", problem=str(exc))

    async def run(self) -> None:
        """Flush every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()
