"""Positions in the merged log of a run. A line gets its ``seq`` when it is first read, and keeps
it.

Storage merges the logs of ranks that are still writing, so the order of lines depends on when they
are read. A view therefore numbers lines once for all readers of this service. The newest lines stay
in memory. For older ones the view remembers their logs and storage's cursors, and reads them again
in the same order. After a restart the service numbers lines again, in storage's order; lines that
ranks logged at the same time may change places.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import anyio.to_thread

from everstep.wire import LogLine
from service.api.answers import answer_of
from service.api.blocking import storage_call
from storage.errors import StorageNotFound
from storage.filesystem import Storage
from storage.logs.rank_logs import LoggedLine, read_rank_logs
from storage.run_dir import RunDir

POLL_S: Final = 0.5
_BATCH_LINES: Final = 1000
_RING_LINES: Final = 5000
_RING_BYTES: Final = 2 << 20
"""Bytes of messages in memory for one view."""
_VIEWS: Final = 64


@dataclass(frozen=True)
class ViewKey:
    """Which lines of which run; ``rank`` and ``attempt`` None select all."""

    run_id: str
    rank: int | None
    attempt: int | None


@dataclass(frozen=True)
class _Source:
    """The log that contains a line."""

    submission: int
    attempt: int
    rank: int | None
    part: int


@dataclass(frozen=True)
class _Mark:
    """Storage's cursor after line ``seq``."""

    seq: int
    cursor: dict[str, str]


class LogView:
    """The lines of one key in one order."""

    def __init__(
        self,
        run_dir: RunDir,
        key: ViewKey,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._key = key
        self._monotonic = monotonic
        self._marks = [_Mark(0, {})]
        self._ring: deque[LoggedLine] = deque()
        self._ring_bytes = 0
        self._sources: list[_Source] = []
        self._order = array("I")  # of every line, the index of its source
        self._times = array("d")  # of every line, unix seconds
        self._by_time = array("I")  # positions of lines, by time; of all that were settled
        self._looked_at = float("-inf")
        self._lock = asyncio.Lock()

    @property
    def _head(self) -> int:
        """Return the number of the last line."""
        return len(self._order)

    async def read(self, after: int, limit: int, *, fresh: bool = True) -> list[LogLine]:
        """Return the lines after ``after`` in order, at most ``limit``.

        Args:
            after: position of the last line that the caller knows.
            limit: maximum number of lines.
            fresh: False reads storage only if nobody did for POLL_S seconds, so that many followers
                cost no more than one.

        Raises:
            StorageError: the logs cannot be read now.
        """
        async with self._lock:
            if fresh or self._monotonic() - self._looked_at >= POLL_S:
                while self._head <= after + limit and await self._extend():
                    pass
                self._looked_at = self._monotonic()
            if self._head <= after:
                return []
            in_memory = self._head - len(self._ring)
            kept = await self._parts() if after < in_memory else set()
            while after < in_memory:
                lines, after = await self._read_again(after, kept)
                if lines:
                    return lines[:limit]
            kept_lines = islice(self._ring, after - in_memory, after - in_memory + limit)
            return [
                answer_of(LogLine, line, seq=seq)
                for seq, line in enumerate(kept_lines, start=after + 1)
            ]

    async def newest(self) -> int:
        """Return the number of lines that have places in time: all that were logged by now. Reads
        storage at most once in POLL_S seconds.

        Raises StorageError.
        """
        async with self._lock:
            if self._monotonic() - self._looked_at >= POLL_S:
                while await self._extend():
                    pass
                self._looked_at = self._monotonic()
            await self._settle()
            return len(self._by_time)

    def place_in_time(self, seq: int) -> int:
        """Return how many known lines were logged before line ``seq``."""
        if not 1 <= seq <= self._head:
            return len(self._by_time)
        return bisect_left(self._by_time, self._when(seq), key=self._when)

    def line_at(self, place: int) -> int:
        """Return the number of the line with this many lines before it, by time."""
        return self._by_time[place] if place < len(self._by_time) else self._head + 1

    async def read_in_time(self, start: int, end: int) -> list[LogLine]:
        """Return known lines by the time at which they were logged, over all ranks.

        Args:
            start: number of lines before the first.
            end: number of lines before the one after the last.

        Raises:
            StorageError: the logs cannot be read now.
        """
        wanted = self._by_time[start:end]
        seqs, lines, index = sorted(wanted), dict[int, LogLine](), 0
        while index < len(seqs):
            found = await self.read(seqs[index] - 1, _BATCH_LINES, fresh=False)
            lines |= {line.seq: line for line in found}
            last = found[-1].seq if found else seqs[index]
            index = max(index + 1, bisect_right(seqs, last))
        return [lines[seq] for seq in wanted if seq in lines]

    def _when(self, seq: int) -> tuple[float, int]:
        return self._times[seq - 1], seq

    def holds_more(self, lines: Sequence[LogLine]) -> bool:
        """Return whether more lines are known after these."""
        return bool(lines) and lines[-1].seq < self._head

    async def _extend(self) -> bool:
        """Number new lines. Return whether there were any."""
        lines, cursor = await self._fetch(self._marks[-1].cursor)
        for line in lines:
            self._order.append(self._index(_source_of(line)))
            self._times.append(line.at)
            self._keep(line)
        if lines:
            self._marks.append(_Mark(self._head, cursor))
        return bool(lines)

    def _keep(self, line: LoggedLine) -> None:
        """Keep the newest line in memory, and drop the oldest above the limits."""
        self._ring.append(line)
        self._ring_bytes += len(line.message)
        while len(self._ring) > _RING_LINES or self._ring_bytes > _RING_BYTES:
            self._ring_bytes -= len(self._ring.popleft().message)

    async def _settle(self) -> None:
        """Sort all lines by time, if there are new ones; in a thread, where other requests do not
        wait for it."""
        if len(self._by_time) < self._head:
            times = self._times.tobytes()
            self._by_time = await anyio.to_thread.run_sync(_in_order_of_time, times)

    def _index(self, source: _Source) -> int:
        if source not in self._sources:
            self._sources.append(source)
        return self._sources.index(source)

    async def _read_again(self, after: int, kept: set[_Source]) -> tuple[list[LogLine], int]:
        """Read old lines up to the next mark again. Return them and that mark's position.

        Every log is read from the previous mark as far as it was read then, and its lines get their
        old positions. A log that grew too long has lost its oldest part: sources that are not in
        ``kept`` are left out.
        """
        position = bisect_right(self._marks, after, key=lambda mark: mark.seq)
        mark, end = self._marks[position - 1], self._marks[position].seq
        order = [self._sources[index] for index in self._order[mark.seq : end]]
        missing = Counter(source for source in order if source in kept)
        found: dict[_Source, deque[LoggedLine]] = {source: deque() for source in missing}
        cursor = mark.cursor
        while missing.total() > 0:
            lines, cursor = await self._fetch(cursor)
            if not lines:
                raise StorageNotFound(
                    f"log lines of run {self._key.run_id} were deleted; read again from the start"
                )
            for line in lines:
                source = _source_of(line)
                if missing[source] > 0:
                    missing[source] -= 1
                    found[source].append(line)
        numbered = [
            (seq, source) for seq, source in enumerate(order, start=mark.seq + 1) if source in kept
        ]
        again = [answer_of(LogLine, found[source].popleft(), seq=seq) for seq, source in numbered]
        return [line for line in again if line.seq > after], end

    async def _parts(self) -> set[_Source]:
        """Return the logs that still exist."""
        logs = await storage_call(self._run_dir.rank_logs)
        return {
            _Source(log.submission, log.attempt, None if log.rank < 0 else log.rank, log.part)
            for log in logs
        }

    async def _fetch(self, cursor: dict[str, str]) -> tuple[list[LoggedLine], dict[str, str]]:
        return await storage_call(
            read_rank_logs, self._run_dir, cursor, self._key.rank, self._key.attempt, _BATCH_LINES
        )


class LogViews:
    """The most recently used views, at most 64."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._views: OrderedDict[ViewKey, LogView] = OrderedDict()

    def view(self, run_id: str, rank: int | None, attempt: int | None) -> LogView:
        key = ViewKey(run_id, rank, attempt)
        found = self._views.setdefault(key, LogView(RunDir(self._storage, run_id), key))
        self._views.move_to_end(key)
        while len(self._views) > _VIEWS:
            self._views.popitem(last=False)
        return found

    def forget(self, run_id: str) -> None:
        """Drop the views of a deleted run."""
        for key in [key for key in self._views if key.run_id == run_id]:
            del self._views[key]


def _in_order_of_time(times: bytes) -> array[int]:
    """Return the numbers of lines with these times, in order of time, then of number."""
    import numpy  # here: most services never need it

    order = numpy.argsort(numpy.frombuffer(times), kind="stable")  # lets go of the interpreter
    return array("I", (order + 1).astype(numpy.uint32).tobytes())


def _source_of(line: LoggedLine) -> _Source:
    return _Source(line.submission, line.attempt, line.rank, line.part)
