"""Answers of the service: what a client reads. Times are RFC 3339 UTC, durations in seconds, sizes in bytes."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer, WithJsonSchema


def format_time(value: datetime) -> str:
    """RFC 3339 in UTC with milliseconds, for example ``2026-01-02T03:04:05.678Z``."""
    return (value if value.tzinfo is UTC else value.astimezone(UTC)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Time = Annotated[AwareDatetime, PlainSerializer(format_time, return_type=str, when_used="json")]


class Answer(BaseModel):
    """Base of answers: immutable; unknown fields are ignored so that an older client can read a newer service."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class RunStatus(StrEnum):
    """Where a run is in its life; the last three are terminal."""

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
    """Why a run is in its status, where the status alone does not say it."""

    USER_ERROR = "user_error"
    NO_PROGRESS = "no_progress"
    SYSTEM_FAILURES_EXHAUSTED = "system_failures_exhausted"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    INFEASIBLE = "infeasible"
    CANCELLED_BY_USER = "cancelled_by_user"
    PAUSED_BY_USER = "paused_by_user"
    PREEMPTED_BY_PRIORITY = "preempted_by_priority"
    WAITING_FOR_CAPACITY = "waiting_for_capacity"
    WAITING_FOR_CLUSTER = "waiting_for_cluster"
    STORAGE_UNAVAILABLE = "storage_unavailable"


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


class Reason(Answer):
    code: ReasonCode
    """Machine-readable cause."""
    message: str
    """The same in words, with what to do."""


class Transition(Answer):
    model_config = ConfigDict(populate_by_name=True)

    from_status: RunStatus | None = Field(alias="from")
    """Status before; null for the first."""
    to_status: RunStatus = Field(alias="to")
    """Status after."""
    at: Time
    """When it was recorded."""
    reason: Reason | None = None
    """Why, where the status alone does not say it."""


class LatestCheckpoint(Answer):
    step: int
    """Optimizer steps in it."""
    committed_at: Time
    """When its manifest was written."""
    size_bytes: int
    """Sum of its files."""


Loss = Literal["no_steps", "few_steps", "checkpoint"]
"""What a death costs: no committed step, the few since a node last kept the state, or those since the last durable checkpoint."""


class Protection(Answer):
    survives: tuple[Literal["rank", "node", "driver", "head"], ...]
    """What may die now without ending the run."""
    worst_case_steps_lost: int
    """Steps that would be repeated in the worst of these cases: those since the last durable checkpoint."""
    process_loss: Loss | None = None
    """What is lost when processes of ranks die and their nodes live; null while no rank trains."""
    node_loss: Loss | None = None
    """What is lost when a node with ranks dies; null while no rank trains."""
    message: str | None = None
    """The same in words."""


class Links(Answer):
    ray_dashboard: str | None
    """URL of the Ray dashboard."""
    ray_job: str | None
    """URL of this run's newest job there."""
    dashboard: str | None
    """URL of this run's own page."""


class Best(Answer):
    metric: str
    """Name of the validation metric."""
    value: float
    """Its best value."""
    step: int
    """Optimizer steps at that evaluation."""


class ForkedFrom(Answer):
    run_id: str
    """Run whose checkpoint this one began from."""
    step: int
    """Steps in that checkpoint."""


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
    """Optimizer steps done in the committed lineage."""
    total_steps: int | None
    """Steps of the whole run; null until the data set's size is known."""
    world_size: int | None
    """Ranks now; null while none run."""
    metrics: dict[str, float]
    """Latest value of every metric."""
    best: Best | None
    latest_checkpoint: LatestCheckpoint | None
    restarts: int
    """Attempts after the first."""
    steps_lost: int
    """Steps that had to be repeated, over all failures."""
    protection: Protection
    goodput: float | None
    """Share of wall time that trained, 0..1; null before the first step."""
    links: Links
    transitions: tuple[Transition, ...]
    forked_from: ForkedFrom | None = None
    """By `resume_from`; null for a run that began afresh."""
    guarantee: str | None = None
    """What may be relied on of the samples' use over restarts and other world sizes, in words; null before the first step."""


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
    """Name of the checkpoint that it began from, `RUN_ID/NAME` where that is another run's; null for a fresh start."""
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
    """What the first failing rank logged last, oldest first; ``seq`` is 0. The driver's where no rank failed first."""


class RankTimes(Answer):
    """A rank's typical step: medians over the last few seconds of training."""

    rank: int
    node_id: str
    micro_batches: int
    """Its share of a global batch."""
    own_s: float
    """Seconds of a step in which it worked by itself: data, forward, backward, optimizer."""
    wait_s: float
    """The rest of the step: all-reduce, most of it waiting for slower ranks."""
    skew: float
    """Its own time by that of a typical peer for the same share; 1 is as fast as the others."""


class NodeTimes(Answer):
    """The mean of a node's ranks."""

    node_id: str
    ranks: tuple[int, ...]
    own_s: float
    wait_s: float
    skew: float


class Straggler(Answer):
    """A rank that held its peers up for a while."""

    at: Time
    """When that was sure; it began some 15 s before."""
    attempt: int
    rank: int
    node_id: str
    step: int
    own_s: float
    peers_s: float
    """What a typical peer took for the same share."""
    skew: float
    ended_at: Time | None
    """When it was as fast as the others again, or its attempt ended; null while it is slow."""


class GpuUse(Answer):
    """A rank's GPU over the last minute."""

    rank: int
    node_id: str
    at: Time
    name: str
    busy: float | None
    """Share of the time in which a kernel ran, 0 to 1; null where the driver does not tell."""
    used_bytes: int
    """Most of the GPU's memory that was in use, whoever used it."""
    total_bytes: int
    allocated_bytes: int
    """Most that the rank's own tensors took."""


class StragglerReport(Answer):
    at: Time | None
    """When the ranks' times were told; null before the first time, and for runs of one rank."""
    attempt: int | None
    step: int | None
    step_s: float | None
    ranks: tuple[RankTimes, ...]
    nodes: tuple[NodeTimes, ...]
    stragglers: tuple[Straggler, ...]
    """Every rank that was ever found slow, oldest first."""
    gpus: tuple[GpuUse, ...] = ()
    """Of the ranks that train on GPUs, as told last; by rank."""


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


class EpochSamples(Answer):
    epoch: int
    samples: int
    used_once: int
    duplicates: int
    missing: int
    digest: str
    """Hash chain over the indices that the loaders yielded, in order of steps."""


class SampleOrigin(Answer):
    """Where a forked run's account begins. What came before is in the other run's; the ledger's chain goes on from there."""

    run_id: str
    checkpoint: str
    step: int
    """Steps done there."""
    epoch: int
    """Epoch that was in progress; its counts hold what both runs used of it."""
    samples: int
    """Samples of that epoch that the other run used."""
    digest: str
    """Hash chain over every step up to there."""


class Samples(Answer):
    epochs: tuple[EpochSamples, ...]
    origin: SampleOrigin | None = None
    """Of a run that began from another run's checkpoint; null otherwise."""


class GoodputBuckets(Answer):
    queued: float = 0.0
    starting: float = 0.0
    productive: float = 0.0
    checkpoint_stall: float = 0.0
    detecting: float = 0.0
    restarting: float = 0.0
    rework: float = 0.0
    paused: float = 0.0
    idle: float = 0.0


class Goodput(Answer):
    wall_s: float
    buckets: GoodputBuckets
    goodput: float | None


class ProjectGoodput(Answer):
    """The wall time of all runs of a project together; runs that were deleted are left out."""

    project: str
    runs: int
    wall_s: float
    buckets: GoodputBuckets
    goodput: float | None
    """Productive share of the time in which a run held resources, that is, of all but ``queued`` and ``paused``; null for none."""


MetricPoint = Annotated[
    tuple[int, float, float | None],
    WithJsonSchema({"type": "array", "items": {"type": ["number", "null"]}, "minItems": 3, "maxItems": 3}),
]
"""Step, unix seconds, value; null was not finite."""


class MetricSeries(Answer):
    series: dict[str, list[MetricPoint]]
    """For each name ``[step, unix seconds, value]``; a value that is not finite is null."""


NodeState = Literal["ALIVE", "CORDONED", "DRAINING", "DRAINED", "DEAD"]
"""``CORDONED``: no new rank goes there, those that are there stay. ``DRAINING``: ranks are leaving. ``DRAINED``: they have left,
and the node may be taken away. ``DEAD``: the cluster has lost it."""


class NodeMark(Answer):
    """Why a node takes no new ranks."""

    reason: str | None
    """In words; evidence where the service cordoned the node by itself."""
    by: str
    """Name of the token that asked for it; ``everstep`` is the service itself."""
    at: Time
    deadline: Time | None
    """When a draining node is to be taken away; null where nobody said."""


class Node(Answer):
    id: str
    hostname: str
    ip: str
    state: NodeState
    is_head: bool
    mark: NodeMark | None = None
    """Who cordoned or drained it, and why; null where nobody did, or where only Ray was told."""
    resources_total: dict[str, float]
    runs: tuple[str, ...]
    """Ids of the runs with ranks on it."""


class ClusterInfo(Answer):
    available: bool
    """Whether Ray answered; nodes are then current."""
    address: str | None
    dashboard_url: str | None
    ray_version: str | None
    nodes: tuple[Node, ...]


class Readiness(Answer):
    status: Literal["ready", "unavailable"]
    database: Literal["up", "down"]
    storage: Literal["up", "down"]
    ray: Literal["up", "down"]
    reconciler_lag_s: float | None
    """Seconds since the reconciler's last finished tick."""


class ProblemError(Answer):
    loc: tuple[str | int, ...]
    msg: str


class Problem(Answer):
    """RFC 9457 answer to a request that failed."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: tuple[ProblemError, ...] = ()


T = TypeVar("T")


class Page(Answer, Generic[T]):
    items: tuple[T, ...]
    next_cursor: str | None
    """Pass it as ``cursor`` for the next page; null on the last."""
