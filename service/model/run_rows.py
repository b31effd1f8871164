"""The table of a run's fields. Each is written once: its type, meaning and value in a new run.

``service.db.tables`` derives the columns from it, ``service.api.answers`` copies fields of the same
name into the public answer. Times are unix seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict
from sqlalchemy import Select, Table, select

from everstep.spec.run_spec import most_workers, origin_of
from everstep.spec.sections import (
    CheckpointSpec,
    NotifySpec,
    RecoverySpec,
    ReplaySpec,
    ResumeFrom,
    ScalingSpec,
    TrainSpec,
    WandbSpec,
)
from everstep.wire import Reason, RunStatus
from service.model.rows import StoredRow
from storage.run_control import Stop

_STATUSES: Final = {status.value: status for status in RunStatus}


class Chars(NamedTuple):
    """Mark a text that the database keeps in a column of at most so many characters."""

    most: int


RunId = Annotated[str, Chars(32)]


@dataclass(frozen=True, kw_only=True)
class RunSummary(StoredRow):
    """The fields of a run that lists show. They are short: a list reads many."""

    id: RunId
    name: Annotated[str, Chars(128)]
    project: Annotated[str, Chars(64)]
    priority: int
    tags: dict[str, str]
    created_at: float
    time_ledger: dict[str, Any]
    """State of the goodput fold; see TimeLedger."""
    work_ledger: dict[str, Any] | None = None
    """State of the fold of pace and resources; see WorkLedger. None for a run of an older
    version."""
    status: Annotated[RunStatus, Chars(16)] = RunStatus.QUEUED
    reason_code: Annotated[str, Chars(64)] | None = None
    reason_message: str | None = None
    submission: int = 0
    """Newest claimed submission; 0 before the first."""
    ray_job_id: Annotated[str, Chars(128)] | None = None
    """Ray job of the newest submission, once Ray took it."""
    attempt: int = 0
    """Worker groups started so far; 0 before the first."""
    epoch: int = 0
    """Epochs done."""
    step: int = 0
    """Optimizer steps done in the committed lineage."""
    total_steps: int | None = None
    """Steps of the whole run; None until the data set's size is known."""
    world_size: int | None = None
    """Ranks now; None while none run."""
    workers: list[dict[str, Any]] = field(default_factory=list)
    """Ranks of the running attempt: {rank, node_id, node_ip, pid}."""
    snapshots: Annotated[str, Chars(16)] | None = None
    """How that attempt keeps states on its nodes; None until it reports it."""
    guarantee: str | None = None
    """What is guaranteed about the use of samples, in words; None until the driver reports it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Latest value of every metric."""
    best: dict[str, Any] | None = None
    """Best evaluation: {metric, value, step}."""
    latest_checkpoint: dict[str, Any] | None = None
    """Newest of ``recent_checkpoints``."""
    restarts: int = 0
    """Attempts after the first, without those that follow a pause by the owner."""
    steps_lost: int = 0
    """Steps that had to be repeated, over all failures."""
    redone_s: float | None = None
    """Seconds of work between reports that were done again, at most; None unless a step is a report
    of a user's function."""
    replay_of: dict[str, Any] | None = None
    """Of a replay: ``wire.replays.Replay``."""
    chain: Annotated[str, Chars(64)] | None = None
    """Hash chain over the steps, after the newest one; None until a step reports one."""
    started_at: float | None = None
    """Time of the first optimizer step."""
    finished_at: float | None = None
    owner: Annotated[str, Chars(128)] | None = None
    """Who submitted it, as ``Principal.owner``; None for a run of an older version whose token is
    not known."""
    notes: str | None = None
    """What its users wrote about it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", _STATUSES[self.status])

    @classmethod
    def read(cls, values: Iterable[Any]) -> Self:
        """Return the row with these values of ``select``'s columns."""
        run = cls.__new__(cls)
        # A page of a list reads 50 rows: __init__ of a frozen class takes five times as long.
        run.__dict__.update(zip(cls.__dataclass_fields__, values, strict=True))
        run.__post_init__()
        return run

    @property
    def reason(self) -> Reason | None:
        """Return why the run is in its status, if the status alone does not say it."""
        if self.reason_code is None:
            return None
        # another replica may be newer
        return Reason.model_validate(
            {"code": self.reason_code, "message": self.reason_message or ""}
        )


@dataclass(frozen=True, kw_only=True)
class RunRow(RunSummary):
    """A whole run."""

    spec: dict[str, Any]
    """The spec as resolved, with every default filled in. Read it through ``stored_spec``."""
    created_by: Annotated[str, Chars(32)]
    """Token id."""
    updated_at: float
    replayed_run: RunId | None = None
    """Of a replay: the run whose steps it trains again."""
    stop_requested: Annotated[Stop | Literal["delete"], Chars(8)] | None = None
    """A request, not a status; ``delete`` for a run that has ended, whose files are being
    deleted."""
    stop_requested_at: float | None = None
    preempted_by: RunId | None = None
    """Run that this one is paused for; it queues again by itself."""
    workers_limit: int | None = None
    """Most ranks of the newest submission; None is ``scaling.max_workers``."""
    shrunk: dict[str, Any] | None = None
    """While it makes room for another run: {to (most ranks), by, at}."""
    submitted_at: float | None = None
    """When Ray took the newest submission."""
    steps_per_epoch: int | None = None
    recent_checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """Checkpoints of the lineage that are not deleted, oldest first."""
    steps_lost_at_restore: int = 0
    """Part of ``steps_lost`` that is estimated, until the driver reports the number."""
    journal_submission: int = 0
    """Submission whose journal the cursor belongs to."""
    journal_cursor: str | None = None
    journal_n: int = 0
    """Last event of that journal that was applied."""
    last_seq: int = 0
    """Seq of the last event of the history."""
    row_version: int = 0
    """Grows with every change of the row."""

    @cached_property
    def stored_spec(self) -> StoredSpec:
        """Return the parts of the spec that the service works with, parsed once."""
        return StoredSpec.read(self.spec)

    @property
    def resume_from(self) -> ResumeFrom | None:
        """Return the checkpoint of another run that this one began from."""
        return self.stored_spec.resume_from

    @property
    def exactness(self) -> str:
        """Return ``train.exactness`` of the spec."""
        return self.stored_spec.train.exactness

    @property
    def audit_fraction(self) -> float:
        """Return ``train.audit_fraction`` of the spec."""
        return self.stored_spec.train.audit_fraction

    @property
    def max_system_failures(self) -> int:
        return self.stored_spec.recovery.max_system_failures


@dataclass(frozen=True, kw_only=True)
class ListedRun(RunSummary):
    """A run in a list, with what lists show of its spec."""

    resume_from: ResumeFrom | None
    exactness: str | None
    audit_fraction: float | None
    max_system_failures: int | None

    @classmethod
    def select(cls, table: Table) -> Select[Any]:
        spec = table.c.spec
        parts = {
            "resume_from": spec["resume_from"],
            "exactness": spec["train", "exactness"].as_string(),
            "audit_fraction": spec["train", "audit_fraction"].as_float(),
            "max_system_failures": spec["recovery", "max_system_failures"].as_integer(),
        }
        names = cls.__dataclass_fields__
        return select(*(parts[name] if name in parts else table.c[name] for name in names))

    @classmethod
    def read(cls, values: Iterable[Any]) -> Self:
        run = super().read(values)
        if run.resume_from is not None:  # as JSON
            # as StoredSpec reads it: fields of newer versions are ignored
            origin = ResumeFrom.model_validate(run.resume_from, extra="ignore")
            object.__setattr__(run, "resume_from", origin)
        if run.exactness is None:  # a spec from before there was a choice
            object.__setattr__(run, "exactness", "world_size")
        if run.audit_fraction is None:
            object.__setattr__(run, "audit_fraction", 0.0)
        return run


class RunHead(NamedTuple):
    """A run's place in a list, and the version of its row."""

    id: str
    created_at: float
    row_version: int


# ---------------------------------------------------------------- stored spec

# What the service reads of a stored spec.


class CodeInSpec(BaseModel):
    """Which entry point of a user's own code a run calls."""

    model_config = ConfigDict(frozen=True)

    task: str | None = None
    train_fn: str | None = None
    script: str | None = None


class StoredSpec(BaseModel):
    """The sections of a spec that scheduling, projections and webhooks need.

    A stored spec was validated when it was submitted, perhaps by another version. A field that it
    lacks has its default, a field that is unknown here is ignored, and the other sections (task,
    most of code, optimizer, env) are not read: a spec that this version could not run does not keep
    lists and the reconciler from working. A run is started only from the whole spec, by
    ``RunSpec``.

    >>> StoredSpec.read({"train": {"epochs": 3, "from_the_future": 1}}).train.epochs
    3
    """

    model_config = ConfigDict(frozen=True)

    train: TrainSpec = TrainSpec()
    scaling: ScalingSpec = ScalingSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    recovery: RecoverySpec = RecoverySpec()
    resume_from: ResumeFrom | None = None
    replay: ReplaySpec | None = None
    notify: NotifySpec | None = None
    wandb: WandbSpec | None = None
    code: CodeInSpec | None = None

    @property
    def origin(self) -> ResumeFrom | None:
        """As ``RunSpec.origin``."""
        return origin_of(self.resume_from, self.replay)

    @property
    def runs_own_function(self) -> bool:
        """As ``RunSpec.runs_own_function``."""
        return self.code is not None and (self.code.train_fn or self.code.script) is not None

    @property
    def best_by(self) -> tuple[str, Literal["min", "max"]] | None:
        """As ``CheckpointSpec.best_by``."""
        return self.checkpoint.best_by(is_own_loop=self.runs_own_function)

    @property
    def most_workers(self) -> int:
        """As ``RunSpec.most_workers``."""
        return most_workers(self.train, self.scaling, is_own_loop=self.runs_own_function)

    @classmethod
    def read(cls, spec: Mapping[str, Any]) -> Self:
        """Return the view of a spec from the database."""
        return cls.model_validate(spec, extra="ignore")
