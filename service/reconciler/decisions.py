"""What the reconciler may decide. Each decision is a value; execute.py carries it out."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.wire import Reason, RunStatus
from storage.run_control import Stop


@dataclass(frozen=True)
class Start:
    """Claim submission ``after + 1`` and submit it."""

    run_id: str
    after: int
    limit: int | None = None
    """Most ranks that a queued run may use, where that is fewer than it asked for."""


@dataclass(frozen=True)
class Preempt:
    """Pause a run for ``by``, which has a higher priority; it queues again once it is paused."""

    run_id: str
    submission: int
    by: str


@dataclass(frozen=True)
class Shrink:
    """Let a run go on with ``limit`` ranks, to make room for ``by``, which has a higher
    priority."""

    run_id: str
    submission: int
    limit: int
    by: str


@dataclass(frozen=True)
class Grow:
    """Let a run that was shrunk have as many ranks again as it was started with."""

    run_id: str
    submission: int


@dataclass(frozen=True)
class DeliverLimit:
    """Tell a submission's driver how many ranks its run may use while it makes room."""

    run_id: str
    submission: int
    limit: int


@dataclass(frozen=True)
class SubmitClaimed:
    """Submit a submission that was claimed before, under the same id."""

    run_id: str
    submission: int


@dataclass(frozen=True)
class DeliverStop:
    """Tell a submission's driver to stop."""

    run_id: str
    submission: int
    stop: Stop


@dataclass(frozen=True)
class EndJob:
    """Let Ray end a job's driver."""

    submission_id: str


@dataclass(frozen=True)
class ChangeStatus:
    """Change a run's status where status and submission still are what was seen."""

    run_id: str
    expected: RunStatus
    submission: int
    to: RunStatus
    reason: Reason


@dataclass(frozen=True)
class SayReason:
    """Say why a run waits, or clear it."""

    run_id: str
    expected: RunStatus
    reason: Reason | None


Decision = (
    Start
    | Preempt
    | Shrink
    | Grow
    | DeliverLimit
    | SubmitClaimed
    | DeliverStop
    | EndJob
    | ChangeStatus
    | SayReason
)


def submission_id(run_id: str, submission: int) -> str:
    """The Ray job's id: derived, so that submitting twice makes one job."""
    return f"{run_id}-s{submission:03d}"
