"""Frozen rows: what the store hands out. Times are unix seconds."""

from __future__ import annotations

from dataclasses import Field, dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, Literal, NamedTuple

from sqlalchemy import Select, Table, select

from everstep.wire import ErrorKind
from storage.cluster import MarkedNode

Role = Literal["viewer", "submitter", "admin"]
RANK: Final[dict[Role, int]] = {"viewer": 0, "submitter": 1, "admin": 2}
"""Role -> its place: a role has the rights of all lower ones."""
TokenKind = Literal["log_in", "personal"]
"""``log_in``: a user's rights, used by browser sessions only, nobody has its secret. ``personal``:
a user made it on the account page."""
NAME_CHARS: Final = 128
"""Longest name of a token or user."""
SESSION_PREFIX: Final = "ses_"
SESSION_DIGITS: Final = 24
MarkState = Literal["cordoned", "draining", "open"]


def to_time(seconds: float) -> datetime:
    """Return the time of unix seconds, in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


_FIRST_SEEN: Final[dict[float, float]] = {}


def past(at: float, now: float) -> float:
    """Return a stored time, in unix seconds, that is to be compared with ``now``.

    The clock may have been set back since it was stored. One in the future counts as now, which is
    the moment at which this process first saw it: what waits since then waits on from there.
    """
    if at <= now:
        _FIRST_SEEN.pop(at, None)
        return at
    _FIRST_SEEN[at] = first = min(now, _FIRST_SEEN.get(at, now))
    return first  # another thread may have forgotten it already


def maybe_time(seconds: float | None) -> datetime | None:
    return None if seconds is None else to_time(seconds)


class StoredRow:
    """What rows share: selected from a table, taken apart into columns."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @classmethod
    def select(cls, table: Table) -> Select[Any]:
        """A query whose rows are this class's arguments in their order: ``cls(*row)``."""
        return select(*(table.c[name] for name in cls.__dataclass_fields__))

    def columns(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class EventRow(StoredRow):
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
class CheckpointCheck(StoredRow):
    """When a checkpoint's files were last read back; ``problem`` is None where all had their size
    and digest."""

    name: str
    verified_at: float
    problem: str | None


@dataclass(frozen=True, slots=True)
class TokenRow(StoredRow):
    """Who a bearer token is. ``project`` None reaches every project."""

    id: str
    name: str
    role: Role
    project: str | None
    sha256: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    last_used_at: float | None = None
    user_id: str | None = None
    """The user that it belongs to; None if an administrator made it."""
    owner: str | None = None
    """The user's name, an e-mail address; None if an administrator made it."""
    kind: TokenKind | None = None


@dataclass(frozen=True, slots=True)
class SessionRow(StoredRow):
    """A browser's log-in, without its secret, and whom it belongs to."""

    sha256: str
    token_id: str
    created_at: float
    expires_at: float
    address: str | None
    browser: str | None
    name: str
    role: Role
    project: str | None

    @property
    def id(self) -> str:
        """Return the name of the session for people. The hash is of 256 random bits, so its
        beginning says nothing of the cookie."""
        return SESSION_PREFIX + self.sha256[:SESSION_DIGITS]


@dataclass(frozen=True, slots=True)
class ProjectRow(StoredRow):
    """A project and its quotas; None is no limit."""

    name: str
    max_workers: int | None
    max_running: int | None
    max_queued: int | None
    created_at: float


@dataclass(frozen=True, slots=True)
class AuditRow(StoredRow):
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
class NodeMarkRow(StoredRow):
    """The last word about a node; ``open`` is one that was uncordoned, whose failures before ``at``
    are forgiven."""

    node_id: str
    state: MarkState
    reason: str | None
    by: str
    at: float
    deadline: float | None
    gone_since: float | None

    @property
    def mark(self) -> MarkedNode | None:
        """Return the mark that drivers read; None if the node may take ranks."""
        if self.state == "open":
            return None
        return MarkedNode(self.node_id, self.state, self.reason, self.by, self.at, self.deadline)


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """A failure that began with a rank on this node. ``at`` is unix seconds."""

    run_id: str
    node_id: str
    at: float
    verdict: str
    exception: str = ""
    kind: ErrorKind | None = None
    owner: str | None = None
    """Who submitted the run; None for a run of an older version."""
    archive: str | None = None
    """Digest of the user's code that the run executes; None for a built-in task."""
