"""What administrators do: ``client.projects``, ``client.tokens``, ``client.audit``,
``client.storage``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any
from urllib.parse import quote

from everstep.client.transport import Transport
from everstep.wire import format_time
from everstep.wire.storage_status import StorageAdoption, StorageStatus
from everstep.wire.team import AuditEntry, NewToken, Project, Role, Token


class Tokens:
    """An administrator's view of the tokens, as ``client.tokens``.

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
    ) -> NewToken:
        """Make a token; ``token`` of the answer is its secret, shown only here.

        Args:
            name: what people call it.
            role: ``viewer``, ``submitter`` or ``admin``.
            project: the one project that it reaches; left out for an admin.
            expires_at: with a time zone; None never.
            create_project: make the project where it does not exist, which is a fault otherwise.

        Raises InvalidSpec for what cannot be, AuthError for others than administrators.
        """
        body: dict[str, Any] = {"name": name, "role": role}
        if project is not None:
            body["project"] = project
        if expires_at is not None:
            body["expires_at"] = format_time(expires_at)
        params = {"create_project": "true"} if create_project else None
        return self._transport.parse(
            self._transport.send("POST", "/v1/tokens", params=params, body=body), NewToken
        )

    def list(self) -> Iterator[Token]:
        """Every token that is not revoked, oldest first."""
        return self._transport.pages("/v1/tokens", Token)

    def revoke(self, token_id: str) -> None:
        """Make a token worthless from now on. Raises NotFound, AuthError."""
        self._transport.send("DELETE", f"/v1/tokens/{quote(token_id, safe='')}")


class Projects:
    """An administrator's view of the projects, as ``client.projects``.

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
        """Make a project, or give one that is there these quotas in place of its own; None is no
        limit.

        Raises InvalidSpec for what cannot be, AuthError for others than administrators.
        """
        quotas = {"max_workers": max_workers, "max_running": max_running, "max_queued": max_queued}
        body = {"name": name, "quotas": quotas}
        return self._transport.parse(
            self._transport.send("POST", "/v1/projects", body=body, repeatable=True), Project
        )

    def list(self) -> Iterator[Project]:
        """Every project with its quotas and what it uses, by name."""
        return self._transport.pages("/v1/projects", Project)

    def get(self, name: str) -> Project:
        """One project. Raises NotFound, AuthError."""
        return self._transport.get(f"/v1/projects/{quote(name, safe='')}", Project)

    def delete(self, name: str) -> None:
        """Forget a project. Raises Conflict where it still has runs or tokens, NotFound,
        AuthError."""
        self._transport.send("DELETE", f"/v1/projects/{quote(name, safe='')}")


class Audit:
    """What was done through the API, as ``client.audit``; for administrators."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self, *, token_id: str | None = None) -> Iterator[AuditEntry]:
        """Calls that changed something or were refused, newest first, fetched page by page; of one
        token, where given."""
        return self._transport.pages("/v1/audit", AuditEntry, {"token_id": token_id})


class Storage:
    """The storage that the service's database belongs to, as ``client.storage``; for
    administrators."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def status(self) -> StorageStatus:
        """Compare the storage with what the database knows of it. Raises AuthError."""
        return self._transport.get("/v1/storage", StorageStatus)

    def adopt(self) -> StorageAdoption:
        """Have the service go on with the storage that is there, and without what that lacks.
        Raises AuthError, Unavailable."""
        return self._transport.parse(
            self._transport.send("POST", "/v1/storage/adopt", repeatable=True), StorageAdoption
        )
