"""What happened in a run: events, attempts, log lines, checkpoints, and the code that it
runs."""

from __future__ import annotations

from typing import Any, Literal

from everstep.wire.base import Answer, Time


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
