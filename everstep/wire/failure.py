"""A failure of a run: its verdict, which rank failed first, what was done, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Protocol

from everstep.wire.base import Answer, Time
from everstep.wire.events import NODE_UNFIT
from everstep.wire.history import LogLine


class Verdict(StrEnum):
    """What a failure was, according to the evidence."""

    USER_ERROR = "user_error"
    WORKER_LOST = "worker_lost"
    NODE_LOST = "node_lost"
    OUT_OF_MEMORY = "out_of_memory"
    PREEMPTION = "preemption"
    HANG = "hang"
    HARDWARE = "hardware"
    SILENT_CORRUPTION = "silent_corruption"
    STORAGE = "storage"
    CONTROL_PLANE = "control_plane"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> Verdict:
        """Read verdicts of newer drivers and services as UNKNOWN."""
        return cls.UNKNOWN


class ErrorKind(StrEnum):
    """What stopped a rank, classified where its exception was raised."""

    USER = "user"
    """The task, its model or its data raised, or the loss was not finite."""
    COLLECTIVE = "collective"
    """A collective failed: the consequence of a peer's failure, never its cause."""
    OUT_OF_MEMORY = "out_of_memory"
    """The host ran out of memory. It is shared, and may suffice the next time."""
    DEVICE_MEMORY = "device_memory"
    """The GPU ran out of memory, because of the model and not the node."""
    DEVICE = "device"
    """The GPU, its driver or one of its libraries failed."""
    STORAGE = "storage"
    """Everstep's storage code could not read or write."""
    STORAGE_NOT_SHARED = "storage_not_shared"
    """Nodes see different storage under one path."""
    NODE = "node"
    """The node cannot train; found before its ranks started."""
    EXCHANGE = "exchange"
    """The exchange between ranks was not complete; the step was refused."""
    CORRUPTION = "corruption"
    """The rank holds other weights or gradients than its peers; the step was refused."""
    LOADER_LOST = "loader_lost"
    """A loader process of the rank was killed."""
    HANG = "hang"
    """The rank's own watchdog stopped it."""


class FailureEvent(Protocol):
    """An event of kind ``failure``, from a journal, the database or a client."""

    @property
    def at(self) -> float | datetime:
        """Unix seconds, or a time with its zone."""

    @property
    def attempt(self) -> int: ...
    @property
    def submission(self) -> int: ...
    @property
    def data(self) -> Mapping[str, Any]: ...


class CausingDrill(Answer):
    """The drill that injected a failure."""

    id: str
    kind: str
    by: str | None
    """Name of the token that requested it; null for a drill of an older version."""


class Failure(Answer):
    """One failure: the data of its event, and what later events add."""

    at: Time
    attempt: int
    verdict: Verdict
    first_rank: int | None
    """Rank that failed first; its peers' errors followed from it."""
    node_id: str | None
    step: int | None
    """Optimizer steps done, as far as reported; null before the first."""
    exception: str | None
    """The first failing rank's exception."""
    evidence: dict[str, Any]
    action: str
    """What Everstep did about it."""
    budget: str | None
    """Budget that it was charged to."""
    steps_lost: int | None
    """Steps that had to be repeated; null while not known."""
    detect_s: float | None
    recovery_s: float | None
    world_size_before: int | None
    world_size_after: int | None
    rung: str | None = None
    """Where the recovery found processes and state: ``in_process`` (survivors kept their
    processes), ``snapshot`` or ``checkpoint``; null while not known, and if the run began anew."""
    drill: CausingDrill | None = None
    """The drill that caused it; null for a failure that nobody ordered."""
    submission: int = 0
    """Ray Job whose attempt failed."""
    last_lines: tuple[LogLine, ...] = ()
    """Last log lines of the first failing rank, oldest first; ``seq`` is 0. The driver's if no rank
    failed first."""

    @classmethod
    def of(cls, event: FailureEvent, **data: Any) -> Failure:
        """Return the failure that an event describes; ``data`` replaces the event's data.

        Fields that an older driver did not write are null.
        """
        at = event.at if isinstance(event.at, datetime) else datetime.fromtimestamp(event.at, UTC)
        known = {name: None for name in cls.model_fields} | {"evidence": {}, "action": ""}
        known |= {"last_lines": (), **(data or event.data)}
        of_event = {"at": at, "attempt": event.attempt, "submission": event.submission}
        return cls.model_validate(known | of_event)

    def event_data(self) -> dict[str, Any]:
        """Return the data of this failure's event."""
        others = {"at", "attempt", "submission", "last_lines"}
        return self.model_dump(mode="json", exclude=others)

    @property
    def kind(self) -> ErrorKind | None:
        """Return the kind of the first failing rank's error; None if it raised none.

        Older drivers did not write it. For them, the text identifies the two kinds that say more
        about a node than the verdict does.
        """
        if "kind" in self.evidence:
            known = self.evidence["kind"] in set(ErrorKind)
            return ErrorKind(self.evidence["kind"]) if known else None
        if self.verdict is Verdict.OUT_OF_MEMORY and "CUDA" in (self.exception or ""):
            return ErrorKind.DEVICE_MEMORY
        if (self.exception or "").startswith(NODE_UNFIT):
            return ErrorKind.NODE
        return None
