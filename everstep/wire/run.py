"""The current state of a run: status, reason, progress, protection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from everstep.wire.base import Answer, Open, Time
from everstep.wire.events import LogLine

# ---------------------------------------------------------------- failure

# A failure of a run: its verdict, which rank failed first, what was done, and what it cost.


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
    EXITED = "exited"
    """The user's code ended the rank's process by ``os._exit``."""
    LOADER_LOST = "loader_lost"
    """A loader process of the rank was killed."""
    HANG = "hang"
    """The rank's own watchdog stopped it."""


RANKS_SHOWN = 32
"""Ranks that the evidence of a failure names, however large the group."""
FOLLOWED = ("collateral", "left")
"""States of ranks that merely lost a peer."""


def with_few_ranks(evidence: dict[str, Any]) -> dict[str, Any]:
    """Return the evidence with the ranks that did not merely follow first, and of a large group
    only how many others there are in each state, as ``more_ranks``."""
    ranks = evidence.get("ranks") or ()
    if len(ranks) <= RANKS_SHOWN:
        return evidence
    ranks = sorted(ranks, key=lambda rank: rank["state"] in FOLLOWED)
    more = Counter(rank["state"] for rank in ranks[RANKS_SHOWN:])
    return {**evidence, "ranks": ranks[:RANKS_SHOWN], "more_ranks": dict(more.most_common())}


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
    """Facts by name. ``ranks`` has at most 32 of a group, ``more_ranks`` counts the others by how
    they ended."""
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
    """Where the recovery found the state: ``snapshot`` or ``checkpoint``, in runs of earlier
    versions also ``in_process``; null while not known, and if the run began anew."""
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
        known: dict[str, Any] = dict.fromkeys(cls.model_fields) | {"evidence": {}, "action": ""}
        known |= {"last_lines": (), **(data or event.data)}
        known["evidence"] = with_few_ranks(known["evidence"])
        of_event = {"at": at, "attempt": event.attempt, "submission": event.submission}
        return cls.model_validate(known | of_event)

    def event_data(self) -> dict[str, Any]:
        """Return the data of this failure's event."""
        others = {"at", "attempt", "submission", "last_lines"}
        return self.model_dump(mode="json", exclude=others)

    @property
    def kind(self) -> ErrorKind | None:
        """Return the kind of the first failing rank's error; None if it raised none, or one that
        only a newer driver knows."""
        kind = self.evidence.get("kind")
        return ErrorKind(kind) if kind in set(ErrorKind) else None


# ---------------------------------------------------------------- replays

# Replays: steps of a run trained again by a run of their own, and compared one by one.

ReplayResult = Literal["equal", "differs", "not_proven"]


class ReplayRequest(BaseModel):
    """Body of POST /v1/runs/{id}/replays."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    from_step: int = Field(ge=0)
    """Steps done in the state to begin with: 0, or a checkpoint of the run."""
    to_step: int = Field(ge=1)
    """Last step to train again."""
    workers: int | None = Field(default=None, ge=1)
    """Number of ranks; null is as many as trained these steps."""


class Replay(Answer):
    """What a run trains again, and what came of it."""

    run_id: str
    """The run whose steps are trained again. Nothing of it is changed."""
    from_step: int
    """Steps done in the state that the replay began with."""
    to_step: int
    """Last step of the replay."""
    result: Open[ReplayResult] | None = None
    """Null until the replay has ended. `equal`: every step is equal in every bit that was recorded.
    `differs`: `step` is the first one that is not. `not_proven`: nothing differs, but something is
    missing for a proof."""
    step: int | None = None
    """The first step that differs, or for which something is missing."""
    differs: tuple[Open[Literal["loss", "gradient", "weights", "samples"]], ...] = ()
    """What differs at that step."""
    compared: int = 0
    """Steps that were compared and are equal."""
    message: str | None = None
    """The result in words."""


# ---------------------------------------------------------------- run


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
    PREEMPTED_BY_PRIORITY = "preempted_by_priority"
    WAITING_FOR_CAPACITY = "waiting_for_capacity"
    WAITING_FOR_CLUSTER = "waiting_for_cluster"
    STORAGE_UNAVAILABLE = "storage_unavailable"
    DRIVER_NEVER_BEGAN = "driver_never_began"


class Reason(Answer):
    code: Open[ReasonCode]
    """Machine-readable cause."""
    message: str
    """The cause in words, with what to do."""


class Transition(Answer):
    model_config = ConfigDict(populate_by_name=True)

    from_status: Open[RunStatus] | None = Field(alias="from")
    """Status before; null for the first."""
    to_status: Open[RunStatus] = Field(alias="to")
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
    survives: tuple[Open[Literal["rank", "node", "driver", "head"]], ...]
    """What may fail now without ending the run."""
    worst_case_steps_lost: int
    """Steps to repeat in the worst of these cases: those since the last durable checkpoint."""
    process_loss: Open[Loss] | None = None
    """What is lost if rank processes die and their nodes do not; null while no rank trains."""
    node_loss: Open[Loss] | None = None
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
    status: Open[RunStatus]
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
    """Epochs done, and so the number of the one in progress, counted from 0."""
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
    """Attempts after the first, without those by which a paused run was resumed. A preemption
    counts as one."""
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
    exactness: Open[Literal["world_size", "elastic"]] = "world_size"
    """What `train.exactness` of the spec says: the same bits at equal numbers of ranks, or at any.
    A user's own loop decides itself."""
    audit_fraction: float = 0.0
    """What `train.audit_fraction` of the spec says: the share of steps in which ranks compute
    micro-batches of each other again."""
    guarantee: str | None = None
    """How samples are used over restarts and changes of the world size, in words; null before the
    first step."""
    owner: str | None = None
    """Who submitted the run: a user, or the name of a token; null if that is not known."""
    notes: str | None = None
    """What its users wrote about it."""
