"""Frozen rows: what the store hands out. Times are unix seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self

from sqlalchemy import RowMapping, Select, Table, select

from everstep.wire import Reason, ReasonCode, RunStatus
from storage.cluster.node_marks import NodeMark
from storage.run_dir import Stop

Role = Literal["viewer", "submitter", "admin"]
MarkWord = Literal["cordoned", "draining", "open"]


_STATUSES: Final = {status.value: status for status in RunStatus}


class Row:
    """What rows share: made from a result, taken apart into columns."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @classmethod
    def of(cls, mapping: RowMapping) -> Self:
        """The row in a query's result; columns that it does not have are left out."""
        return cls(**{name: mapping[name] for name in cls.__dataclass_fields__})

    @classmethod
    def select(cls, table: Table) -> Select[Any]:
        """A query whose rows are this class's arguments in their order: ``cls(*row)``."""
        return select(*(table.c[name] for name in cls.__dataclass_fields__))

    def columns(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class RunRow(Row):
    """A run as the database knows it; see tables.py for each column."""

    id: str
    name: str
    project: str
    priority: int
    tags: dict[str, str]
    spec: dict[str, Any]
    created_by: str
    status: RunStatus
    reason_code: str | None
    reason_message: str | None
    stop_requested: Stop | None
    stop_requested_at: float | None
    preempted_by: str | None
    submission: int
    workers_limit: int | None
    shrunk: dict[str, Any] | None
    ray_job_id: str | None
    submitted_at: float | None
    attempt: int
    epoch: int
    step: int
    total_steps: int | None
    steps_per_epoch: int | None
    world_size: int | None
    workers: list[dict[str, Any]]
    snapshots: str | None
    guarantee: str | None
    metrics: dict[str, float]
    best: dict[str, Any] | None
    latest_checkpoint: dict[str, Any] | None
    recent_checkpoints: list[dict[str, Any]]
    restarts: int
    steps_lost: int
    steps_lost_at_restore: int
    time_ledger: dict[str, Any]
    created_at: float
    started_at: float | None
    finished_at: float | None
    journal_submission: int
    journal_cursor: str | None
    journal_n: int
    last_seq: int
    updated_at: float
    row_version: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", _STATUSES[self.status])

    @property
    def reason(self) -> Reason | None:
        if self.reason_code is None:
            return None
        return Reason(code=ReasonCode(self.reason_code), message=self.reason_message or "")

    @property
    def resume_from(self) -> dict[str, Any] | None:
        """The checkpoint that the spec names: {run_id, step}."""
        origin: dict[str, Any] | None = self.spec.get("resume_from")
        return origin

    @property
    def max_system_failures(self) -> int | None:
        """What the spec says of it."""
        most: int | None = self.spec["recovery"]["max_system_failures"]
        return most


class RunHead(NamedTuple):
    """That a run is in a list, and which version of its row it is."""

    id: str
    created_at: float
    row_version: int


class ListedRun(NamedTuple):
    """A run as lists tell of it: what takes long to read and is not told is left out. Columns as in
    RunRow."""

    status: RunStatus
    id: str
    name: str
    project: str
    reason_code: str | None
    reason_message: str | None
    priority: int
    tags: dict[str, str]
    attempt: int
    submission: int
    ray_job_id: str | None
    created_at: float
    started_at: float | None
    finished_at: float | None
    epoch: int
    step: int
    total_steps: int | None
    world_size: int | None
    workers: list[dict[str, Any]]
    snapshots: str | None
    guarantee: str | None
    metrics: dict[str, float]
    best: dict[str, Any] | None
    latest_checkpoint: dict[str, Any] | None
    restarts: int
    steps_lost: int
    time_ledger: dict[str, Any]
    resume_from: dict[str, Any] | None
    max_system_failures: int | None

    @classmethod
    def select(cls, runs: Table) -> Select[Any]:
        """A query whose rows ``of`` takes."""
        spec = runs.c.spec
        parts = {
            "resume_from": spec["resume_from"],
            "max_system_failures": spec["recovery", "max_system_failures"].as_integer(),
        }
        return select(*(parts[name] if name in parts else runs.c[name] for name in cls._fields))

    @classmethod
    def of(cls, row: Sequence[Any]) -> Self:
        return cls(_STATUSES[row[0]], *row[1:])


@dataclass(frozen=True, slots=True)
class EventRow(Row):
    """One event of a run's public history; ``seq`` counts from 1 without gaps."""

    seq: int
    at: float
    kind: str
    submission: int
    attempt: int
    data: dict[str, Any]


class TransitionRow(NamedTuple):
    """One change of a run's status; ``from_status`` is None for the first."""

    run_id: str
    seq: int
    from_status: str | None
    to_status: str
    at: float
    reason_code: str | None
    reason_message: str | None


METRIC_NAME_CHARS: Final = 128
"""Longest name of a series; a longer one is cut."""


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """One value of one metric; ``value`` None was not finite."""

    name: str
    step: int
    at: float
    value: float | None


@dataclass(frozen=True, slots=True)
class CheckpointCheck(Row):
    """When a checkpoint's files were last read back; ``problem`` is None where all had their size
    and digest."""

    name: str
    verified_at: float
    problem: str | None


@dataclass(frozen=True, slots=True)
class TokenRow(Row):
    """Who a bearer token is. ``project`` None reaches every project."""

    id: str
    name: str
    role: Role
    project: str | None
    sha256: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


@dataclass(frozen=True, slots=True)
class ProjectRow(Row):
    """A project and its quotas; None is no limit."""

    name: str
    max_workers: int | None
    max_running: int | None
    max_queued: int | None
    created_at: float


@dataclass(frozen=True, slots=True)
class AuditRow(Row):
    """One call that changed something, or was refused."""

    seq: int
    at: float
    token_id: str | None
    token_name: str | None
    role: Role | None
    address: str | None
    method: str
    path: str
    target: str | None
    status: int


@dataclass(frozen=True, slots=True)
class NodeMarkRow(Row):
    """The last word about a node; ``open`` is one that was uncordoned, whose failures before ``at``
    are forgiven."""

    node_id: str
    state: MarkWord
    reason: str | None
    by: str
    at: float
    deadline: float | None
    gone_since: float | None

    @property
    def mark(self) -> NodeMark | None:
        """What drivers are told; None where the node may take ranks."""
        if self.state == "open":
            return None
        return NodeMark(self.node_id, self.state, self.reason, self.by, self.at, self.deadline)


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """A failure that began with a rank on this node. ``at`` is unix seconds."""

    run_id: str
    node_id: str
    at: float
    verdict: str
    exception: str = ""
