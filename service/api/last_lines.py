"""The last log lines of the first failing rank, for a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from everstep.wire import Failure, LogLine, Verdict
from service.api.answers import to_time
from storage.errors import StorageError
from storage.logs.rank_logs import LoggedLine, last_rank_lines
from storage.run_dir import RunDir

if TYPE_CHECKING:
    from service.api.context import ApiContext

_FAILURES: Final = 20


async def with_last_lines(
    context: ApiContext, run_id: str, failures: Sequence[Failure], limit: int
) -> tuple[Failure, ...]:
    """Return the failures, the newest 20 with at most ``limit`` last lines; without lines if the
    storage does not respond."""
    newest = failures[-_FAILURES:] if limit else ()
    logged = await asyncio.gather(
        *(_last_lines(context, run_id, failure, limit) for failure in newest)
    )
    completed = [
        each.model_copy(update={"last_lines": lines})
        for each, lines in zip(newest, logged, strict=True)
    ]
    return (*failures[: len(failures) - len(newest)], *completed)


def _read(run_dir: RunDir, failure: Failure, limit: int) -> list[LoggedLine]:
    if failure.first_rank is not None:
        return last_rank_lines(
            run_dir, failure.submission, failure.attempt, failure.first_rank, limit
        )
    # The lost driver is either the one that reports it, after it lost its controller, or the one of
    # the previous submission.
    before = failure.at.timestamp()
    by_submission = [
        last_rank_lines(run_dir, submission, failure.attempt, None, limit, before)
        for submission in (failure.submission - 1, failure.submission)
    ]
    return [line for lines in by_submission for line in lines][-limit:]


async def _last_lines(
    context: ApiContext, run_id: str, failure: Failure, limit: int
) -> tuple[LogLine, ...]:
    if failure.first_rank is None and failure.verdict != Verdict.CONTROL_PLANE:
        return ()
    try:
        found = await context.storage_call(_read, RunDir(context.storage, run_id), failure, limit)
    except StorageError:
        return ()
    return tuple(
        LogLine(
            seq=0,
            at=to_time(line.at),
            submission=line.submission,
            attempt=line.attempt,
            rank=line.rank,
            level=line.level,
            message=line.message,
        )
        for line in found
    )
