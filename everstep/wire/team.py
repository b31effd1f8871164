"""Projects, tokens and the audit log: who may do what, how much, and what they did."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from everstep.wire import Answer, Time

Role = Literal["viewer", "submitter", "admin"]
"""``viewer`` looks, ``submitter`` also submits and stops runs, ``admin`` does everything in every
project."""

ProjectName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
TokenName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
Quota = Annotated[int, Field(ge=0, le=1_000_000)]


class Quotas(BaseModel):
    """What a project may use at most; null is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_workers: Quota | None = None
    """Ranks of all its runs together."""
    max_running: Quota | None = None
    """Runs that have a job at the same time."""
    max_queued: Quota | None = None
    """Runs that wait; one more is refused with 409 ``quota_exceeded``."""


class ProjectRequest(BaseModel):
    """Body of POST /v1/projects."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: ProjectName
    """Lower-case letters, digits, ``-`` and ``_``."""
    quotas: Quotas = Quotas()
    """They replace what the project had."""


class ProjectUsage(Answer):
    """What a project uses now."""

    workers: int
    """Ranks that train."""
    running: int
    """Runs that have a job."""
    queued: int
    """Runs that wait."""


class Project(Answer):
    """A project: its runs are seen by its own tokens and by administrators only."""

    name: str
    quotas: Quotas
    usage: ProjectUsage
    created_at: Time


class TokenRequest(BaseModel):
    """Body of POST /v1/tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: TokenName
    """What people call it."""
    role: Role
    """What it may do."""
    project: ProjectName | None = None
    """The one project that it reaches; left out for an ``admin``, which reaches all."""
    expires_at: AwareDatetime | None = None
    """From when on it is worthless; null never."""


class Token(Answer):
    """A token without its secret, which nobody can read again."""

    id: str
    name: str
    role: Role
    project: str | None
    """Null reaches every project."""
    created_at: Time
    expires_at: Time | None
    last_used_at: Time | None
    """A few seconds late; null was never used."""


class NewToken(Token):
    """A token that was just made."""

    token: str
    """The secret, shown here and never again."""
    warning: str | None = None
    """Why the token can do more than its role says; null where it cannot."""

    def __repr__(self) -> str:
        return (
            f"NewToken(id={self.id!r}, name={self.name!r}, role={self.role!r}, "
            f"project={self.project!r}, token='…')"
        )

    __str__ = __repr__


class AuditEntry(Answer):
    """One call that changed something, or that was refused."""

    seq: int
    at: Time
    token_id: str | None
    """Null: the call came without a valid token."""
    token_name: str | None
    role: Role | None
    address: str | None
    """Where it came from."""
    method: str
    path: str
    target: str | None
    """Id or name of what was made or acted upon."""
    status: int
    """HTTP status of its answer."""
