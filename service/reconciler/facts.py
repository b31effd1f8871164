"""What is known about runs and the cluster at one moment: all that decisions may rest on."""

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
    """Ray was not asked, or did not answer: nothing may be concluded."""
    MISSING = "missing"
    """Ray answered that it knows no such job."""
    ALIVE = "alive"
    """Pending or running."""
    ENDED = "ended"
    """Succeeded, failed or stopped, by Ray's word; or its driver's node is dead, though Ray calls
    the job running."""


class TailFact(StrEnum):
    """How far the journal of a run's newest submission was read, after the job was asked about."""

    BEHIND = "behind"
    """There is more, or storage did not answer."""
    DRAINED = "drained"
    """Everything that was written before the job was asked about is applied."""


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
    """When the stop was asked for, unix seconds."""
    stop_delivered: bool = False
    """Whether the newest submission's driver was told, as far as this process knows."""
    submission: int = 0
    """Newest claimed; 0 before the first."""
    job_recorded: bool = False
    """Whether Ray is known to have taken the newest submission."""
    submitted_at: float | None = None
    """When that was, unix seconds."""
    fruitless: int = 0
    """Newest submissions in a row that committed no checkpoint."""
    job: JobFact = JobFact.UNKNOWN
    storage_problem: str | None = None
    """Why the newest submission's driver left the storage alone and ended; None where it did not,
    or is not known to have."""
    tail: TailFact = TailFact.BEHIND
    deadline_at: float | None = None
    """When ``recovery.deadline_s`` is over, unix seconds."""
    steps_done: bool = False
    """Whether all steps are done: what is left is the last checkpoint and the driver's word."""
    min_workers: int = 1
    max_workers: int = 1
    workers_limit: int | None = None
    """Most ranks that the newest submission was started with; None: ``max_workers``."""
    shrunk_to: int | None = None
    """Most ranks that it may use while it makes room for ``shrunk_by``; None where it makes room
    for nobody."""
    shrunk_by: str | None = None
    shrunk_at: float | None = None
    """When it was asked to, unix seconds."""
    shrink_delivered: bool = False
    """Whether the newest submission's driver was told of ``shrunk_to``, as far as this process
    knows."""
    world_size: int | None = None
    node_ids: tuple[str, ...] = ()
    """The node of each rank that runs now."""
    worker: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    """Ray resources of one rank, without what ``use_gpu`` adds."""
    use_gpu: bool | Literal["auto"] = False
    placement_strategy: str = "SPREAD"
    accelerator_type: str | None = None


@dataclass(frozen=True)
class NodeFacts:
    """One live node of the cluster."""

    node_id: str
    resources: Mapping[str, float]
    mark: Literal["cordoned", "draining"] | None = None
    """A node that is marked takes no new rank; the ranks of a ``cordoned`` one stay, those of a
    ``draining`` one move."""


@dataclass(frozen=True)
class StrayJob:
    """A Ray job that lives although its run has ended, or has a newer submission."""

    submission_id: str
    seen_for_s: float


@dataclass(frozen=True)
class Facts:
    """One look at everything."""

    now: float
    """Unix seconds."""
    runs: tuple[RunFacts, ...] = ()
    nodes: tuple[NodeFacts, ...] | None = None
    """Live nodes; None where Ray did not answer or was not asked."""
    ray_problem: str | None = None
    """Why Ray does not answer; None where it does, or was not asked."""
    storage_problem: str | None = None
    """Why nothing may be begun in the storage, nor concluded from it; None where it is the one that
    the database belongs to."""
    strays: tuple[StrayJob, ...] = ()
    quotas: Mapping[str, Quotas] = field(default_factory=dict)
    """Of projects that have any, by name."""


@dataclass(frozen=True)
class Delivered:
    """What drivers were told by this process: (run, submission, stop) and (run, submission, most
    ranks)."""

    stops: Collection[tuple[str, int, Stop]] = ()
    limits: Collection[tuple[str, int, int]] = ()


NOTHING_DELIVERED: Final = Delivered()
