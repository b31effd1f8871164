"""Administration: ``client.projects``, ``client.tokens``, ``client.sessions``, ``client.audit``,
``client.storage``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any
from urllib.parse import quote

from everstep.client.transport import Transport
from everstep.wire import format_time
from everstep.wire.storage_status import StorageAdoption, StorageStatus
from everstep.wire.team import AuditEntry, NewToken, Project, Role, Session, Token


class Tokens:
    """Manage tokens, as ``client.tokens``.

    >>> made = client.tokens.create("ci", role="submitter", project="vision")  # doctest: +SKIP
    >>> Client(token=made.token)                                               # doctest: +SKIP
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        name: str,
        *,
        role: Role,
        project: str | None = None,
        expires_at: datetime | None = None,
        create_project: bool = False,
        all_projects: bool = False,
    ) -> NewToken:
        """Create a token. ``token`` in the result is its secret, shown only once.

        Args:
            name: display name.
            role: ``viewer``, ``submitter`` or ``admin``.
            project: the one project that the token gives access to; None for an admin.
            expires_at: with a time zone; None never expires.
            create_project: create the project if it does not exist; otherwise that is an error.
            all_projects: for a viewer: read the runs of all projects, and Ray's dashboard.

        Raises InvalidSpec for invalid arguments, AuthError if you are not an administrator.
        """
        body: dict[str, Any] = {"name": name, "role": role}
        if project is not None:
            body["project"] = project
        if all_projects:
            body["all_projects"] = True
        if expires_at is not None:
            body["expires_at"] = format_time(expires_at)
        params = {"create_project": "true"} if create_project else None
        return self._transport.parse(
            self._transport.send("POST", "/v1/tokens", params=params, body=body), NewToken
        )

    def list(self) -> Iterator[Token]:
        """Yield every token that is not revoked, oldest first."""
        return self._transport.pages("/v1/tokens", Token)

    def revoke(self, token_id: str) -> None:
        """Revoke a token at once. Raise NotFound, AuthError."""
        self._transport.send("DELETE", f"/v1/tokens/{quote(token_id, safe='')}")


class Sessions:
    """Log-ins of browsers, as ``client.sessions``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> Iterator[Session]:
        """Yield your own sessions, newest first; an administrator's are those of everybody."""
        return self._transport.pages("/v1/sessions", Session)

    def revoke(self, session_id: str) -> None:
        """End a session at once. Raise NotFound."""
        self._transport.send("DELETE", f"/v1/sessions/{quote(session_id, safe='')}")


class Projects:
    """Manage projects, as ``client.projects``.

    >>> client.projects.create("vision", max_workers=8, max_queued=100)  # doctest: +SKIP
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        name: str,
        *,
        max_workers: int | None = None,
        max_running: int | None = None,
        max_queued: int | None = None,
    ) -> Project:
        """Create a project, or replace the quotas of an existing one; None is no limit.

        Raises InvalidSpec for invalid arguments, AuthError if you are not an administrator.
        """
        quotas = {"max_workers": max_workers, "max_running": max_running, "max_queued": max_queued}
        body = {"name": name, "quotas": quotas}
        return self._transport.parse(
            self._transport.send("POST", "/v1/projects", body=body, repeatable=True), Project
        )

    def list(self) -> Iterator[Project]:
        """Yield every project by name, with its quotas and usage."""
        return self._transport.pages("/v1/projects", Project)

    def get(self, name: str) -> Project:
        """Return one project. Raise NotFound, AuthError."""
        return self._transport.get(f"/v1/projects/{quote(name, safe='')}", Project)

    def delete(self, name: str) -> None:
        """Delete a project. Raise Conflict if it still has runs or tokens, NotFound, AuthError."""
        self._transport.send("DELETE", f"/v1/projects/{quote(name, safe='')}")


class Audit:
    """The audit log, as ``client.audit``; for administrators."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self, *, token_id: str | None = None) -> Iterator[AuditEntry]:
        """Yield calls that changed something or were refused, newest first. Pages are fetched
        lazily.

        Args:
            token_id: only calls of this token.
        """
        return self._transport.pages("/v1/audit", AuditEntry, {"token_id": token_id})


class Storage:
    """The storage of the service, as ``client.storage``; for administrators."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def status(self) -> StorageStatus:
        """Compare the storage with the database. Raise AuthError."""
        return self._transport.get("/v1/storage", StorageStatus)

    def adopt(self) -> StorageAdoption:
        """Make the service continue with the storage that is there, without data that it lacks.
        Raise AuthError, Unavailable."""
        return self._transport.parse(
            self._transport.send("POST", "/v1/storage/adopt", repeatable=True), StorageAdoption
        )
