"""The decisions that the reconciler may make. execute.py carries them out."""

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
    """Most ranks that a queued run may use, if fewer than it requested."""


@dataclass(frozen=True)
class Preempt:
    """Pause a run for ``by``, which has a higher priority. It queues again once it is paused."""

    run_id: str
    submission: int
    by: str


@dataclass(frozen=True)
class Shrink:
    """Limit a run to ``limit`` ranks, to make room for ``by``, which has a higher priority."""

    run_id: str
    submission: int
    limit: int
    by: str


@dataclass(frozen=True)
class Grow:
    """Give a shrunk run its original limit of ranks back."""

    run_id: str
    submission: int


@dataclass(frozen=True)
class DeliverLimit:
    """Send a submission's driver the limit of ranks while its run makes room."""

    run_id: str
    submission: int
    limit: int


@dataclass(frozen=True)
class SubmitClaimed:
    """Submit a submission that is claimed already, under the same id."""

    run_id: str
    submission: int


@dataclass(frozen=True)
class DeliverStop:
    """Send a submission's driver the request to stop."""

    run_id: str
    submission: int
    stop: Stop


@dataclass(frozen=True)
class EndJob:
    """Let Ray end a job's driver."""

    submission_id: str


@dataclass(frozen=True)
class ChangeStatus:
    """Change a run's status, if status and submission are still those that were seen."""

    run_id: str
    expected: RunStatus
    submission: int
    to: RunStatus
    reason: Reason


@dataclass(frozen=True)
class SetReason:
    """Set the reason why a run waits, or clear it."""

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
    | SetReason
)


def submission_id(run_id: str, submission: int) -> str:
    """Return the id of the Ray job. It is derived, so that submitting twice makes one job."""
    return f"{run_id}-s{submission:03d}"
