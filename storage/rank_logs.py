"""What every rank and the driver logged, kept in the run's directory and merged into one order for readers."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice

from storage.append_log import LogCursor, LogWriter, open_log, read_log
from storage.errors import CorruptFile, StorageError
from storage.run_dir import DRIVER_ATTEMPT, RankLog, RunDir


@dataclass(frozen=True)
class LogRecord:
    """One line that a rank logs."""

    at: float
    """Unix seconds."""
    level: str
    message: str


@dataclass(frozen=True)
class LoggedLine:
    """One line as it is read back."""

    submission: int
    attempt: int
    rank: int | None
    """None for the driver."""
    at: float
    """Unix seconds, by the rank's own clock."""
    level: str
    message: str


class RankLogWriter:
    """The log of one rank in one attempt, or (``rank`` None) the driver's. Not thread-safe.

    On an object store every ``write`` makes an object: gather lines for ``storage.batch_s`` first.
    """

    def __init__(self, run_dir: RunDir, submission: int, attempt: int, rank: int | None) -> None:
        where = RankLog(submission, DRIVER_ATTEMPT, -1) if rank is None else RankLog(submission, attempt, rank)
        self._files = run_dir.files
        self._stem = run_dir.rank_log_stem(where)
        self._log: LogWriter | None = None
        self._log = self._open()

    def write(self, lines: Sequence[LogRecord]) -> None:
        """Readers see them on return; they survive a crash of the process, not (before close) one of the machine.

        Raises StorageError, after which some of them may be written; the writer can be used again.
        """
        if not lines:
            return
        log = self._log or self._open()
        try:
            log.append([_encode(line) for line in lines])
        except StorageError:
            with suppress(StorageError):  # the append's own error says more
                self.close()
            raise

    def close(self) -> None:
        if self._log is not None:
            log, self._log = self._log, None
            log.close()

    def __enter__(self) -> RankLogWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> LogWriter:
        self._log = open_log(self._files, self._stem, durable=False)
        return self._log


def read_rank_logs(
    run_dir: RunDir,
    cursor: Mapping[str, str] | None = None,
    rank: int | None = None,
    attempt: int | None = None,
    limit: int = 1000,
) -> tuple[list[LoggedLine], dict[str, str]]:
    """Lines after ``cursor`` by submission, attempt and time, at most ``limit``, and the cursor after them.

    The cursor is a JSON object with one place for each log, so nothing is skipped or repeated while logs grow and new
    attempts appear; a line that an older attempt writes late comes late.

    Args:
        rank: only this rank's lines; None for all ranks and the driver.
        attempt: only this attempt's lines; None for all.
    """
    places = dict(cursor or {})
    wanted = (
        log for log in run_dir.rank_logs() if (rank is None or log.rank == rank) and (attempt is None or log.attempt == attempt)
    )
    lines: list[LoggedLine] = []
    for _, logs in groupby(wanted, key=lambda log: (log.submission, log.attempt)):
        merged = heapq.merge(
            *(_read_one(run_dir, log, places.get(_key(log)), limit - len(lines)) for log in logs), key=lambda found: found[0].at
        )
        for line, key, place in islice(merged, limit - len(lines)):
            lines.append(line)
            places[key] = place
        if len(lines) >= limit:
            break
    return lines, places


def _read_one(run_dir: RunDir, log: RankLog, cursor: str | None, limit: int) -> Iterator[tuple[LoggedLine, str, str]]:
    """A log's lines in its own order, each with the log's key and the cursor after it."""
    key = _key(log)
    for found in read_log(run_dir.files, run_dir.rank_log_stem(log), LogCursor.parse(cursor), limit):
        try:
            raw = json.loads(found.data)
            line = LoggedLine(
                log.submission, log.attempt, None if log.rank < 0 else log.rank, raw["at"], raw["level"], raw["message"]
            )
        except (ValueError, KeyError, TypeError) as exc:
            raise CorruptFile(f"line {found.end.num_lines} of log {key} is not a log record: {found.data[:80]!r}") from exc
        yield line, key, str(found.end)


def _key(log: RankLog) -> str:
    return f"s{log.submission:03d}-a{log.attempt:03d}/{'driver' if log.rank < 0 else f'rank-{log.rank}'}"


def _encode(line: LogRecord) -> bytes:
    return json.dumps({"at": line.at, "level": line.level, "message": line.message}, separators=(",", ":")).encode()
