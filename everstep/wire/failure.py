"""A failure of a run: what it was, who failed first, what was done about it and what it cost."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from everstep.wire.base import Answer, Time
from everstep.wire.history import LogLine


class Verdict(StrEnum):
    """What a failure was, decided from evidence."""

    USER_ERROR = "user_error"
    WORKER_LOST = "worker_lost"
    NODE_LOST = "node_lost"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTION = "preemption"
    HANG = "hang"
    STORAGE = "storage"
    CONTROL_PLANE = "control_plane"
    UNKNOWN = "unknown"


class ErrorKind(StrEnum):
    """What sort of thing stopped a rank, known where its exception was raised."""

    USER = "user"
    """The task, its model or its data raised, or the loss was not finite."""
    COLLECTIVE = "collective"
    """A collective failed: the consequence of a peer's end, never its cause."""
    OUT_OF_MEMORY = "out_of_memory"
    """The host's memory was too small. It is shared, and may suffice the next time."""
    DEVICE_MEMORY = "device_memory"
    """The GPU's memory was too small: the model's doing, not the node's."""
    DEVICE = "device"
    """The GPU, its driver or one of its libraries failed."""
    STORAGE = "storage"
    """The run's storage, or a disk of the node, could not be read or written."""
    STORAGE_NOT_SHARED = "storage_not_shared"
    """Nodes see other storage under one path."""
    NODE = "node"
    """The rank's node cannot train: found out before its ranks began."""
    EXCHANGE = "exchange"
    """The ranks' exchange came back without being complete; the step was refused."""
    LOADER_LOST = "loader_lost"
    """A loader process of the rank was killed."""
    HANG = "hang"
    """The rank's own watchdog stopped it."""


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
