"""The history of a run: events, attempts, log lines, checkpoints and code."""

from __future__ import annotations

from typing import Any, Literal

from everstep.wire.base import Answer, Time


class Event(Answer):
    """One event of a run. docs/event-log.md lists the kinds and their data."""

    seq: int
    """Position in the run's history, from 1, without gaps."""
    at: Time
    """When it happened, by the clock of the machine where it happened."""
    kind: str
    submission: int
    attempt: int
    """Attempt that it belongs to; 0 for none."""
    data: dict[str, Any]


class WorkerInfo(Answer):
    rank: int
    node_id: str
    node_ip: str
    pid: int


class Attempt(Answer):
    """The lifetime of one worker group."""

    attempt: int
    submission: int
    world_size: int
    workers: tuple[WorkerInfo, ...]
    started_at: Time
    ended_at: Time | None
    first_step: int | None
    """Steps done when it began."""
    last_step: int | None
    """Steps done when it ended, as far as reported."""
    restored_from: str | None
    """Name of the checkpoint that it began from, `RUN_ID/NAME` for another run's; null for a fresh
    start."""
    cause: str | None
    """Why it ended: ``finished``, ``stopped``, ``resized``, ``fell_back`` (fresh processes follow,
    see ``recovery.in_process``), or a verdict."""


class LogLine(Answer):
    seq: int
    """Position in the answer; pass it as ``after`` to read on."""
    at: Time
    submission: int
    attempt: int
    rank: int | None
    """Null for the driver."""
    level: str
    message: str


class Checkpoint(Answer):
    step: int
    """Optimizer steps done in it; names it in paths, as `latest` and `best` do."""
    name: str
    """Directory below ``checkpoints/``."""
    epoch: int
    submission: int
    state: Literal["committed", "corrupt", "deleted"]
    size_bytes: int
    digest: str
    """SHA-256 over the manifest, which lists every file's digest."""
    metrics: dict[str, float]
    committed_at: Time
    verified_at: Time | None
    """When its files were last read back and verified."""
    problem: str | None = None
    """What was wrong with it then; null if every file had its size and digest."""


class CodeArchive(Answer):
    """Answer of ``POST /v1/code``."""

    digest: str
    """``sha256:`` and 64 hex digits over the archive's bytes; ``code.archive`` of a spec."""
    size_bytes: int
    modules: tuple[str, ...]
    """Dotted names of the modules in it."""


class EventFileInfo(Answer):
    """A file of TensorBoard."""

    name: str
