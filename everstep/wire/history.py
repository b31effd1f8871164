"""What happened in a run: events, attempts, failures, log lines, checkpoints, and the code that it
runs."""

from __future__ import annotations

from typing import Any, Literal

from everstep.wire.base import Answer, Time
from everstep.wire.run import Verdict


class Event(Answer):
    """One thing that happened to a run; see docs/event-log.md for kinds and their data."""

    seq: int
    """Position in the run's history, from 1, without gaps."""
    at: Time
    """When it happened, by the clock of where it happened."""
    kind: str
    submission: int
    attempt: int
    """Worker group that it belongs to; 0 for none."""
    data: dict[str, Any]


class WorkerInfo(Answer):
    rank: int
    node_id: str
    node_ip: str
    pid: int


class Attempt(Answer):
    """Lifetime of one worker group."""

    attempt: int
    submission: int
    world_size: int
    workers: tuple[WorkerInfo, ...]
    started_at: Time
    ended_at: Time | None
    first_step: int | None
    """Steps that were done when it began."""
    last_step: int | None
    """Steps that were done when it ended, as far as reported."""
    restored_from: str | None
    """Name of the checkpoint that it began from, `RUN_ID/NAME` where that is another run's; null
    for a fresh start."""
    cause: str | None
    """Why it ended: ``finished``, ``stopped``, ``resized``, or a verdict."""


class LogLine(Answer):
    seq: int
    """Position in the answer's order; pass it as ``after``."""
    at: Time
    submission: int
    attempt: int
    rank: int | None
    """Null for the driver."""
    level: str
    message: str


class Failure(Answer):
    at: Time
    attempt: int
    verdict: Verdict
    first_rank: int | None
    """Rank that failed first; its peers' errors followed from it."""
    node_id: str | None
    step: int | None
    exception: str | None
    """The first failing rank's exception."""
    evidence: dict[str, Any]
    action: str
    """What Everstep did."""
    budget: str | None
    """Which budget it was counted on."""
    steps_lost: int | None
    detect_s: float | None
    recovery_s: float | None
    world_size_before: int | None
    world_size_after: int | None
    submission: int = 0
    """Ray Job whose attempt failed."""
    last_lines: tuple[LogLine, ...] = ()
    """What the first failing rank logged last, oldest first; ``seq`` is 0. The driver's where no
    rank failed first."""


class Checkpoint(Answer):
    step: int
    name: str
    """Directory below ``checkpoints/``."""
    epoch: int
    submission: int
    state: Literal["committed", "corrupt", "deleted"]
    size_bytes: int
    digest: str
    """SHA-256 over the manifest; names every file's own digest."""
    metrics: dict[str, float]
    committed_at: Time
    verified_at: Time | None
    """When its files were last read back and compared."""
    problem: str | None = None
    """What was wrong with it then; null where every file had its size and digest."""


class CodeArchive(Answer):
    """Answer of ``POST /v1/code``."""

    digest: str
    """``sha256:`` and 64 hex digits over the archive's bytes; ``code.archive`` of a spec."""
    size_bytes: int
    modules: tuple[str, ...]
    """Dotted names that can be imported from it."""
