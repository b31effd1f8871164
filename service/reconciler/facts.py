"""The facts about runs and cluster at one moment. Decisions use nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from everstep.wire import Reason, RunStatus
from everstep.wire.team import Quotas
from storage.run_control import Stop


class JobFact(StrEnum):
    """What is known about the Ray job of a run's newest submission."""

    UNKNOWN = "unknown"
    """Ray was not asked or did not answer. Nothing may be concluded."""
    MISSING = "missing"
    """Ray knows no such job."""
    ALIVE = "alive"
    """Pending or running."""
    ENDED = "ended"
    """Succeeded, failed or stopped by Ray's status, or its driver's node is dead."""


class TailFact(StrEnum):
    """How far the journal of a run's newest submission was read, after the question about the
    job."""

    BEHIND = "behind"
    """There is more, or the storage did not answer."""
    DRAINED = "drained"
    """Everything that was written before the question about the job is applied."""


@dataclass(frozen=True)
class RunFacts:
    """One run that has neither ended nor paused."""

    id: str
    status: RunStatus
    created_at: float
    project: str = "default"
    priority: int = 0
    reason: Reason | None = None
    stop: Stop | None = None
    stop_at: float | None = None
    """When the stop was requested, unix seconds."""
    stop_delivered: bool = False
    """Whether this process delivered the stop to the newest submission's driver."""
    submission: int = 0
    """Newest claimed submission; 0 before the first."""
    job_recorded: bool = False
    """Whether Ray is known to have the newest submission's job."""
    submitted_at: float | None = None
    """When it was submitted, unix seconds."""
    fruitless: int = 0
    """Number of newest submissions in a row without a checkpoint."""
    job: JobFact = JobFact.UNKNOWN
    storage_problem: str | None = None
    """Why the newest submission's driver ended without touching the storage; None if it did not, or
    if that is unknown."""
    last_words: str | None = None
    """Last lines of the newest submission's driver, if it ended before it began; None if not, or if
    that is unknown."""
    never_began: int = 0
    """Number of newest submissions in a row without a journal."""
    tail: TailFact = TailFact.BEHIND
    deadline_at: float | None = None
    """When ``recovery.deadline_s`` has passed, unix seconds."""
    steps_done: bool = False
    """Whether all steps are done. Only the last checkpoint and the driver's report are missing."""
    min_workers: int = 1
    max_workers: int = 1
    workers_limit: int | None = None
    """Most ranks that the newest submission was started with; None is ``max_workers``."""
    shrunk_to: int | None = None
    """Most ranks while it makes room for ``shrunk_by``; None if it makes no room."""
    shrunk_by: str | None = None
    shrunk_at: float | None = None
    """When it was shrunk, unix seconds."""
    shrink_delivered: bool = False
    """Whether this process delivered ``shrunk_to`` to the newest submission's driver."""
    world_size: int | None = None
    node_ids: tuple[str, ...] = ()
    """Node of each running rank."""
    worker: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    """Ray resources of one rank, without those of ``use_gpu``."""
    use_gpu: bool | Literal["auto"] = False
    placement_strategy: str = "SPREAD"
    accelerator_type: str | None = None


@dataclass(frozen=True)
class NodeState:
    """One live node of the cluster."""

    node_id: str
    resources: Mapping[str, float]
    mark: Literal["cordoned", "draining"] | None = None
    """A marked node gets no new ranks. Ranks stay on a ``cordoned`` node and leave a ``draining``
    one."""


@dataclass(frozen=True)
class StrayJob:
    """A live Ray job whose run has ended or has a newer submission."""

    submission_id: str
    seen_for_s: float


@dataclass(frozen=True)
class Facts:
    """The facts of one look."""

    now: float
    """Unix seconds."""
    runs: tuple[RunFacts, ...] = ()
    nodes: tuple[NodeState, ...] | None = None
    """Live nodes; None if Ray did not answer or was not asked."""
    ray_problem: str | None = None
    """Why Ray does not answer; None if it does or was not asked."""
    storage_problem: str | None = None
    """Why the storage must not be used; None if it belongs to the database."""
    strays: tuple[StrayJob, ...] = ()
    quotas: Mapping[str, Quotas] = field(default_factory=dict)
    """Project -> its quotas, for projects that have some."""


@dataclass(frozen=True)
class Delivered:
    """What this process delivered to drivers: (run, submission, stop) and (run, submission, most
    ranks)."""

    stops: Collection[tuple[str, int, Stop]] = ()
    limits: Collection[tuple[str, int, int]] = ()


NOTHING_DELIVERED: Final = Delivered()


# ---------------------------------------------------------------- decisions

# The decisions that the reconciler may make. execute.py carries them out.


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


@dataclass(frozen=True)
class KeepLastWords:
    """Write the last lines of a driver that kept no log of its own into its log."""

    run_id: str
    submission: int
    text: str


Decision = (
    Start
    | Preempt
    | Shrink
    | Grow
    | DeliverLimit
    | SubmitClaimed
    | KeepLastWords
    | DeliverStop
    | EndJob
    | ChangeStatus
    | SetReason
)


def submission_id(run_id: str, submission: int) -> str:
    """Return the id of the Ray job. It is derived, so that submitting twice makes one job."""
    return f"{run_id}-s{submission:03d}"
