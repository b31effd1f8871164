"""When tokens were last used: gathered, and written now and then, so that no look at a run costs a
write."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog

from service.db.engine import DatabaseError

if TYPE_CHECKING:
    from service.api.context import ApiContext

logger = structlog.get_logger(__name__)

FLUSH_S: Final = 5.0


class TokenUse:
    """Uses that are not in the database yet."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._used_at: dict[str, float] = {}

    def note(self, token_id: str) -> None:
        self._used_at[token_id] = self._context.clock()

    async def flush(self) -> None:
        """Write what was gathered; what the database does not take now stays for the next time."""
        used_at, self._used_at = self._used_at, {}
        if not used_at:
            return
        try:
            await self._context.database_call(self._context.tokens.note_used, used_at)
        except DatabaseError as exc:
            self._used_at = used_at | self._used_at
            logger.warning("the last use of tokens is noted later", problem=str(exc))

    async def run(self) -> None:
        """Flush for ever."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()
