"""The logs of all ranks and the driver, in the run's directory, merged into one order for
readers."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice

from everstep.spec import plain_text
from storage.errors import CorruptFile, StorageError
from storage.logs.growing_log import LogCursor, LogWriter, open_log, read_end, read_log
from storage.run_dir import DRIVER_ATTEMPT, RankLog, RunDir

PART_BYTES = 32 << 20
"""About the size of one part of a log."""
KEPT_PARTS = 4
"""Number of newest parts kept of one rank's log in one attempt."""
_END_BYTES = 256 << 10
"""How far back ``last_rank_lines`` reads in each part."""


@dataclass(frozen=True)
class LogRecord:
    """One line to log."""

    at: float
    """Unix seconds."""
    level: str
    message: str


@dataclass(frozen=True)
class LoggedLine:
    """A logged line as it is read back."""

    submission: int
    attempt: int
    rank: int | None
    """None for the driver."""
    at: float
    """Unix seconds, by the rank's own clock."""
    level: str
    message: str
    part: int = 1
    """Part of the log that contains it."""


class RankLogWriter:
    """The log of one rank in one attempt, or (``rank`` None) of the driver. Not thread-safe.

    On an object store every ``write`` makes an object: gather lines for ``storage.batch_s`` first.
    A long log continues in a new part, and the oldest part is deleted, so that no rank fills the
    storage.
    """

    def __init__(self, run_dir: RunDir, submission: int, attempt: int, rank: int | None) -> None:
        where = (
            RankLog(submission, DRIVER_ATTEMPT, -1)
            if rank is None
            else RankLog(submission, attempt, rank)
        )
        self._run_dir = run_dir
        parts = [
            log.part
            for log in run_dir.rank_logs_of(where.submission, where.attempt)
            if log.rank == where.rank
        ]
        self._where = replace(where, part=max(parts, default=1))
        self._part_bytes = 0
        self._unsure: tuple[int, list[bytes]] | None = None
        self._log: LogWriter | None = None
        self._log = self._open()

    def write(self, lines: Sequence[LogRecord]) -> None:
        """Write lines. Readers see them on return. They survive a crash of the process, but of the
        machine only after ``close``.

        Raises StorageError. Then write the same lines again, first and in the same order: those
        that were written are not repeated.
        """
        if not lines:
            return
        encoded = [_encode(line) for line in lines]
        log = self._log or self._open()
        if self._unsure is not None:
            place, sent = self._unsure
            self._unsure = None
            if encoded[: len(sent)] == sent:
                encoded = encoded[log.arrived(place, sent) :]
        if not encoded:
            return
        if self._part_bytes >= PART_BYTES:
            log = self._next_part(lines[0].at)
        place = log.place
        try:
            log.append(encoded)
        except StorageError:
            self._unsure = place, encoded
            with suppress(StorageError):  # the append's own error says more
                self.close()
            raise
        self._part_bytes += sum(len(line) + 1 for line in encoded)

    def _next_part(self, at: float) -> LogWriter:
        """Start a new part, and delete the oldest."""
        self.close()
        self._where = replace(self._where, part=self._where.part + 1)
        log = self._open()
        self._part_bytes = 0
        oldest = replace(self._where, part=self._where.part - KEPT_PARTS)
        if oldest.part >= 1:
            delete_rank_log(self._run_dir, oldest)
            kept_mb = KEPT_PARTS * PART_BYTES / 1e6
            notice = LogRecord(
                at,
                "WARNING",
                f"older lines of this log were deleted: at most {kept_mb:.0f} MB are kept",
            )
            log.append([_encode(notice)])
        return log

    def close(self) -> None:
        if self._log is not None:
            log, self._log = self._log, None
            log.close()

    def __enter__(self) -> RankLogWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> LogWriter:
        files = self._run_dir.files
        self._log = open_log(files, self._run_dir.rank_log_stem(self._where), durable=False)
        if files.can_append:
            self._part_bytes = self._log.place
        return self._log


def delete_rank_log(run_dir: RunDir, log: RankLog) -> None:
    """Delete one part of a log, if it exists."""
    stem = run_dir.rank_log_stem(log)
    if run_dir.files.can_append:
        run_dir.files.delete_file(f"{stem}.jsonl")
    else:
        run_dir.files.delete_dir(stem)


def read_rank_logs(
    run_dir: RunDir,
    cursor: Mapping[str, str] | None = None,
    rank: int | None = None,
    attempt: int | None = None,
    limit: int = 1000,
) -> tuple[list[LoggedLine], dict[str, str]]:
    """Return lines after ``cursor`` by submission, attempt and time, at most ``limit``, and the
    cursor after them.

    The cursor is a JSON object with one position per log, so nothing is skipped or repeated while
    logs grow and attempts start. A line that an older attempt writes late comes late.

    Args:
        rank: only this rank's lines; None for all ranks and the driver.
        attempt: only this attempt's lines; None for all.
    """
    places = dict(cursor or {})
    wanted = (
        log
        for log in run_dir.rank_logs()
        if (rank is None or log.rank == rank) and (attempt is None or log.attempt == attempt)
    )
    lines: list[LoggedLine] = []
    for _, logs in groupby(wanted, key=lambda log: (log.submission, log.attempt)):
        merged = heapq.merge(
            *(_read_one(run_dir, log, places.get(_key(log)), limit - len(lines)) for log in logs),
            key=lambda found: found[0].at,
        )
        for line, key, place in islice(merged, limit - len(lines)):
            lines.append(line)
            places[key] = place
        if len(lines) >= limit:
            break
    return lines, places


def last_rank_lines(
    run_dir: RunDir,
    submission: int,
    attempt: int,
    rank: int | None,
    limit: int,
    before: float | None = None,
) -> list[LoggedLine]:
    """Return the last lines of one rank in one attempt (``rank`` None: of the driver), oldest
    first, at most ``limit``.

    Args:
        before: only lines that were logged before this time (unix seconds).
    """
    number, place = (-1, DRIVER_ATTEMPT) if rank is None else (rank, attempt)
    found: list[LoggedLine] = []
    for log in reversed(
        [log for log in run_dir.rank_logs_of(submission, place) if log.rank == number]
    ):
        lines = (
            _line(log, data)
            for data in reversed(read_end(run_dir.files, run_dir.rank_log_stem(log), _END_BYTES))
        )
        found += [
            line for line in lines if line is not None and (before is None or line.at < before)
        ][: limit - len(found)]
        if len(found) >= limit:
            break
    return found[::-1]


def _line(log: RankLog, data: bytes) -> LoggedLine | None:
    """Return the line; None for data that is not a log record."""
    try:
        raw = plain_text.loads(data)
        return LoggedLine(
            log.submission,
            log.attempt,
            None if log.rank < 0 else log.rank,
            raw["at"],
            raw["level"],
            raw["message"],
            log.part,
        )
    except (ValueError, KeyError, TypeError):
        return None


def _read_one(
    run_dir: RunDir, log: RankLog, cursor: str | None, limit: int
) -> Iterator[tuple[LoggedLine, str, str]]:
    """Yield a log's lines in its own order, each with the log's key and the cursor after it."""
    key = _key(log)
    for found in read_log(
        run_dir.files, run_dir.rank_log_stem(log), LogCursor.parse(cursor), limit
    ):
        line = _line(log, found.data)
        if line is None:
            raise CorruptFile(
                f"line {found.end.num_lines} of log {key} is not a log record: {found.data[:80]!r}"
            )
        yield line, key, str(found.end)


def _key(log: RankLog) -> str:
    return f"s{log.submission:03d}-a{log.attempt:03d}/{log.name}"


def _encode(line: LogRecord) -> bytes:
    return json.dumps(
        {"at": line.at, "level": line.level, "message": line.message}, separators=(",", ":")
    ).encode()
