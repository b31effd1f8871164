"""Projects, tokens, quotas and the audit log."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from everstep.wire.base import Answer, Open, Time

Role = Literal["viewer", "submitter", "admin"]
"""``viewer`` reads, ``submitter`` also submits and stops runs, ``admin`` may do everything in every
project."""

ProjectName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
TokenName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
Quota = Annotated[int, Field(ge=0, le=1_000_000)]


class Quotas(BaseModel):
    """Limits of a project; null means no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_workers: Quota | None = None
    """Most ranks of all its runs together."""
    max_running: Quota | None = None
    """Most runs that have a job at the same time."""
    max_queued: Quota | None = None
    """Most queued runs; another one is refused with 409 ``quota_exceeded``."""


class ProjectRequest(BaseModel):
    """Body of POST /v1/projects."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: ProjectName
    """Lower-case letters, digits, ``-`` and ``_``."""
    quotas: Quotas = Quotas()
    """They replace the project's quotas."""


class ProjectUsage(Answer):
    """Current use of a project."""

    workers: int
    """Ranks of its runs."""
    running: int
    """Runs that have a job."""
    queued: int
    """Queued runs."""


class Project(Answer):
    """A project. Only its own tokens and administrators see its runs."""

    name: str
    quotas: Quotas
    usage: ProjectUsage
    created_at: Time


class TokenRequest(BaseModel):
    """Body of POST /v1/tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: TokenName
    """A name for people."""
    role: Role
    """What the token may do."""
    project: ProjectName | None = None
    """The project that the token is for; leave it out for an ``admin``, who has access to all."""
    all_projects: bool = False
    """For a ``viewer`` only: read the runs of all projects, and Ray's dashboard."""
    expires_at: AwareDatetime | None = None
    """When the token expires; null for never."""


class Token(Answer):
    """A token without its secret, which is shown only once."""

    id: str
    name: str
    role: Open[Role]
    project: str | None
    """Null means every project."""
    created_at: Time
    expires_at: Time | None
    last_used_at: Time | None
    """Up to a few seconds behind; null if never used."""
    owner: str | None = None
    """E-mail address of the user; null for a token that an administrator made."""
    kind: Open[Literal["log_in", "personal"]] | None = None
    """``log_in``: rights of a user's browser sessions, ended by revoking it. ``personal``: a user
    made it. Null: an administrator made it."""


class Session(Answer):
    """A browser's log-in."""

    id: str
    name: str
    """The user's e-mail address, or the name of the token that logged in."""
    role: Open[Role]
    project: str | None
    """Null means every project."""
    created_at: Time
    expires_at: Time
    address: str | None
    """Where the log-in came from."""
    browser: str | None
    """What the browser calls itself."""


class NewToken(Token):
    """A token that was just created."""

    token: str
    """The secret. Store it now: it is not shown again."""
    warning: str | None = None
    """Why the token can do more than its role says; null if it cannot."""

    def __repr__(self) -> str:
        return (
            f"NewToken(id={self.id!r}, name={self.name!r}, role={self.role!r}, "
            f"project={self.project!r}, token='…')"
        )

    __str__ = __repr__


class AuditEntry(Answer):
    """One call that changed something or was refused."""

    seq: int
    """Place in the log, from 1."""
    at: Time
    token_id: str | None
    """Null for a call without a valid token."""
    token_name: str | None
    role: Open[Role] | None
    address: str | None
    """The caller's address."""
    method: str
    path: str
    target: str | None
    """Id or name of the object that was created or changed."""
    status: int
    """HTTP status of the answer."""
