"""Positions in the merged log of a run: every line gets a ``seq`` when it is first read, and keeps it.

Storage merges the logs of ranks that still write, so the order in which lines are found depends on when one looks. A view
therefore numbers lines once for all readers of this service: the newest stay in memory, and for older ones it remembers
storage's cursors, from which they are read again.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from everstep.wire import LogLine
from service.api.answers import to_time
from storage.rank_logs import LoggedLine, read_rank_logs

if TYPE_CHECKING:
    from service.api.context import ApiContext

POLL_S: Final = 0.5
_BATCH_LINES: Final = 1000
_RING_LINES: Final = 5000
_VIEWS: Final = 64


@dataclass(frozen=True)
class ViewKey:
    """Which lines of which run; ``rank`` and ``attempt`` None take all."""

    run_id: str
    rank: int | None
    attempt: int | None


@dataclass(frozen=True)
class _Mark:
    """Storage's cursor behind line ``seq``."""

    seq: int
    cursor: dict[str, str]


class LogView:
    """One order of lines."""

    def __init__(self, context: ApiContext, key: ViewKey, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._context = context
        self._key = key
        self._monotonic = monotonic
        self._marks = [_Mark(0, {})]
        self._ring: deque[LogLine] = deque(maxlen=_RING_LINES)
        self._head = 0
        self._looked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def read(self, after: int, limit: int) -> list[LogLine]:
        """Lines behind ``after`` in order, at most ``limit``; none where there are none yet. Raises StorageError."""
        async with self._lock:
            while self._head <= after and await self._extend():
                pass
            if self._head <= after:
                return []
            first = self._head - len(self._ring) + 1
            if after + 1 >= first:
                return list(islice(self._ring, after + 1 - first, after + 1 - first + limit))
            return await self._read_again(after, limit)

    async def _extend(self) -> bool:
        """Number what is new; whether anything was. Many followers look at storage no more often than one."""
        if self._monotonic() - self._looked_at < POLL_S:
            return False
        lines, cursor = await self._fetch(self._marks[-1].cursor, _BATCH_LINES)
        if len(lines) < _BATCH_LINES:
            self._looked_at = self._monotonic()
        if not lines:
            return False
        self._ring.extend(_answer(self._head + offset, line) for offset, line in enumerate(lines, start=1))
        self._head += len(lines)
        self._marks.append(_Mark(self._head, cursor))
        return True

    async def _read_again(self, after: int, limit: int) -> list[LogLine]:
        """Old lines, from the mark before them."""
        mark = self._marks[bisect_right(self._marks, after, key=lambda item: item.seq) - 1]
        # Not beyond the next marks: what was numbered there may have been found in another order.
        wanted = min(after + limit, self._head) - mark.seq
        lines, _ = await self._fetch(mark.cursor, wanted)
        numbered = (_answer(mark.seq + offset, line) for offset, line in enumerate(lines, start=1))
        return [line for line in numbered if line.seq > after]

    async def _fetch(self, cursor: dict[str, str], limit: int) -> tuple[list[LoggedLine], dict[str, str]]:
        run_dir = self._context.storage.run_dir(self._key.run_id)
        return await self._context.storage_call(read_rank_logs, run_dir, cursor, self._key.rank, self._key.attempt, limit)


class LogViews:
    """The views that were used last."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._views: OrderedDict[ViewKey, LogView] = OrderedDict()

    def view(self, run_id: str, rank: int | None, attempt: int | None) -> LogView:
        key = ViewKey(run_id, rank, attempt)
        found = self._views.setdefault(key, LogView(self._context, key))
        self._views.move_to_end(key)
        while len(self._views) > _VIEWS:
            self._views.popitem(last=False)
        return found

    def forget(self, run_id: str) -> None:
        """Drop the views of a run that is deleted."""
        for key in [key for key in self._views if key.run_id == run_id]:
            del self._views[key]


def _answer(seq: int, line: LoggedLine) -> LogLine:
    return LogLine(
        seq=seq,
        at=to_time(line.at),
        submission=line.submission,
        attempt=line.attempt,
        rank=line.rank,
        level=line.level,
        message=line.message,
    )
