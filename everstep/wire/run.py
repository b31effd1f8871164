"""The current state of a run: status, reason, progress, protection."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from everstep.wire.base import Answer, Time
from everstep.wire.replays import Replay


class RunStatus(StrEnum):
    """The status of a run. The last three are terminal."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    STOPPING = "STOPPING"
    PAUSED = "PAUSED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL_STATUSES


TERMINAL_STATUSES = frozenset({RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED})


class ReasonCode(StrEnum):
    """Why a run has its status, if the status alone does not say."""

    USER_ERROR = "user_error"
    NO_PROGRESS = "no_progress"
    SYSTEM_FAILURES_EXHAUSTED = "system_failures_exhausted"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    INFEASIBLE = "infeasible"
    CANCELLED_BY_USER = "cancelled_by_user"
    PAUSED_BY_USER = "paused_by_user"
    PAUSED_BY_SWEEP = "paused_by_sweep"
    CANCELLED_BY_SWEEP = "cancelled_by_sweep"
    PREEMPTED_BY_PRIORITY = "preempted_by_priority"
    WAITING_FOR_CAPACITY = "waiting_for_capacity"
    WAITING_FOR_CLUSTER = "waiting_for_cluster"
    STORAGE_UNAVAILABLE = "storage_unavailable"


class Reason(Answer):
    code: ReasonCode
    """Machine-readable cause."""
    message: str
    """The cause in words, with what to do."""


class Transition(Answer):
    model_config = ConfigDict(populate_by_name=True)

    from_status: RunStatus | None = Field(alias="from")
    """Status before; null for the first."""
    to_status: RunStatus = Field(alias="to")
    """Status after."""
    at: Time
    """When it was recorded."""
    reason: Reason | None = None
    """Why the status changed, if the status alone does not say."""


class LatestCheckpoint(Answer):
    step: int
    """Optimizer steps in it."""
    committed_at: Time
    """When its manifest was written."""
    size_bytes: int
    """Sum of its files."""


Loss = Literal["no_steps", "few_steps", "checkpoint"]
"""What a failure costs: no step, the few since the last snapshot, or those since the last durable
checkpoint."""


class Protection(Answer):
    survives: tuple[Literal["rank", "node", "driver", "head"], ...]
    """What may fail now without ending the run."""
    worst_case_steps_lost: int
    """Steps to repeat in the worst of these cases: those since the last durable checkpoint."""
    process_loss: Loss | None = None
    """What is lost if rank processes die and their nodes do not; null while no rank trains."""
    node_loss: Loss | None = None
    """What is lost if a node with ranks dies; null while no rank trains."""
    message: str | None = None
    """This protection in words."""


class Links(Answer):
    ray_dashboard: str | None
    """URL of the Ray dashboard."""
    ray_job: str | None
    """URL of this run's newest job there."""
    dashboard: str | None
    """URL of this run's own page."""


class Progress(Answer):
    """How far a run is, how fast it trains, and how long it still takes."""

    fraction: float | None
    """Steps done of all steps, 0 to 1; null while the number of steps is not known."""
    steps_per_s: float | None
    """Pace of the last minute or so, with evaluations and saves; null while no rank trains."""
    eta_s: float | None
    """Time left at this pace; null while either is not known."""
    elapsed_s: float
    """Time since the run was created, to its end."""


class Usage(Answer):
    """Resources that ranks have held, from the start of each attempt to its end."""

    gpu_h: float | None
    """GPU hours; null for a run that an older version began."""
    cpu_h: float | None
    """CPU hours, as requested for the ranks; null for a run that an older version began."""
    cost: float | None
    """Their price; null if the operator has set none."""
    currency: str | None
    """Currency of the price; null without a price."""


class Best(Answer):
    metric: str
    """Name of the validation metric."""
    value: float
    """Its best value."""
    step: int
    """Optimizer steps at that evaluation."""


class ForkedFrom(Answer):
    run_id: str
    """Run whose checkpoint this one started from."""
    step: int
    """Steps in that checkpoint."""


MOST_NOTES_CHARS = 4000


class RunChange(BaseModel):
    """Body of PATCH /v1/runs/{id}."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    notes: str | None = Field(max_length=MOST_NOTES_CHARS)
    """Free text about the run; null or an empty text removes it."""


class Run(Answer):
    """A user's training run."""

    id: str
    name: str
    project: str
    status: RunStatus
    reason: Reason | None
    priority: int
    tags: dict[str, str]
    attempt: int
    """Worker groups started so far; 0 before the first."""
    submission: int
    """Ray Jobs submitted so far; 0 before the first."""
    created_at: Time
    started_at: Time | None
    """First optimizer step."""
    finished_at: Time | None
    epoch: int
    """Epoch in progress, from 0."""
    step: int
    """Optimizer steps done in the committed lineage; 0 also for a user's script that reports
    none."""
    total_steps: int | None
    """Steps of the whole run; null until the size of the data set is known."""
    world_size: int | None
    """Current number of ranks; null while none run."""
    metrics: dict[str, float]
    """Latest value of every metric."""
    best: Best | None
    latest_checkpoint: LatestCheckpoint | None
    restarts: int
    """Attempts after the first."""
    steps_lost: int
    """Steps that had to be repeated, over all failures."""
    redone_s: float | None = None
    """For a `train_fn` whose steps are its reports: how long it has worked in vain at most, between
    the last report before each failure and the failure. Null if a step is an optimizer step."""
    protection: Protection
    goodput: float | None
    """Share of wall time spent training, 0 to 1; null before the first step."""
    links: Links
    transitions: tuple[Transition, ...]
    forked_from: ForkedFrom | None = None
    """Set by `resume_from`; null for a run without it."""
    progress: Progress | None = None
    """How far, how fast, how long still; null from a service of an older version."""
    usage: Usage | None = None
    """Resources held and their price; null from a service of an older version."""
    replay_of: Replay | None = None
    """What this run trains again of another one, and the result; null for any other run."""
    chain: str | None = None
    """Digest of the steps so far, in order: what each summed up to, its loss and its samples. Runs
    with equal chains took the same steps. Null before the first step, and for a user's own loop."""
    exactness: Literal["world_size", "elastic"] = "world_size"
    """What `train.exactness` of the spec says: the same bits at equal numbers of ranks, or at any.
    A user's own loop decides itself."""
    audit_fraction: float = 0.0
    """What `train.audit_fraction` of the spec says: the share of steps in which ranks compute
    micro-batches of each other again."""
    guarantee: str | None = None
    """How samples are used over restarts and changes of the world size, in words; null before the
    first step."""
    sweep_id: str | None = None
    """Sweep that submitted the run; null for a run of its own."""
    owner: str | None = None
    """Who submitted the run: a user, or the name of a token; null if that is not known."""
    notes: str | None = None
    """What its users wrote about it."""
