"""A failure of a run: what it was, who failed first, what was done about it and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Protocol

from everstep.wire.base import Answer, Time
from everstep.wire.events import NODE_UNFIT
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

    @classmethod
    def _missing_(cls, value: object) -> Verdict:
        """A newer driver or service may know verdicts that this version does not."""
        return cls.UNKNOWN


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
    """Everstep's storage code could not read or write."""
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


class FailureEvent(Protocol):
    """An event of kind ``failure``, as a journal, the database or a client has it."""

    @property
    def at(self) -> float | datetime:
        """Unix seconds, or a time with its zone."""

    @property
    def attempt(self) -> int: ...
    @property
    def submission(self) -> int: ...
    @property
    def data(self) -> Mapping[str, Any]: ...


class Failure(Answer):
    """One failure: the data of its event, and what the run's history adds later."""

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

    @classmethod
    def of(cls, event: FailureEvent, **data: Any) -> Failure:
        """Return the failure that an event tells of, or that ``data`` says in place of its data.

        Fields that an older driver did not write are null.
        """
        at = event.at if isinstance(event.at, datetime) else datetime.fromtimestamp(event.at, UTC)
        known = {name: None for name in cls.model_fields} | {"evidence": {}, "action": ""}
        known |= {"last_lines": (), **(data or event.data)}
        of_event = {"at": at, "attempt": event.attempt, "submission": event.submission}
        return cls.model_validate(known | of_event)

    def event_data(self) -> dict[str, Any]:
        """Return the data of the event that tells of this failure."""
        others = {"at", "attempt", "submission", "last_lines"}
        return self.model_dump(mode="json", exclude=others)

    @property
    def kind(self) -> ErrorKind | None:
        """What the first failing rank's error was; None where it raised none.

        Older drivers did not write it. Of their failures only the text tells the two kinds apart
        for which a node is blamed otherwise than its verdict says.
        """
        if "kind" in self.evidence:
            known = self.evidence["kind"] in set(ErrorKind)
            return ErrorKind(self.evidence["kind"]) if known else None
        if self.verdict is Verdict.OUT_OF_MEMORY and "CUDA" in (self.exception or ""):
            return ErrorKind.DEVICE_MEMORY
        if (self.exception or "").startswith(NODE_UNFIT):
            return ErrorKind.NODE
        return None
