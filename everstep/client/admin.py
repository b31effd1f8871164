"""Administration: ``client.projects``, ``client.tokens``, ``client.sessions``, ``client.audit``,
``client.storage``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

from everstep.client.streams import Part
from everstep.errors import Conflict, NotFound, Unavailable, UsageError
from everstep.wire import ClusterInfo, Node, format_time
from everstep.wire.alerts import Alert, AlertDelivery, AlertFormat, AlertWhen
from everstep.wire.cluster import StorageAdoption, StorageStatus
from everstep.wire.team import AuditEntry, NewToken, Project, Role, Session, Token


class Tokens(Part):
    """Manage tokens, as ``client.tokens``.

    >>> made = client.tokens.create("ci", role="submitter", project="vision")  # doctest: +SKIP
    >>> Client(token=made.token)                                               # doctest: +SKIP
    """

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
        params = {"create_project": create_project or None}
        return self._transport.post("/v1/tokens", NewToken, body, params=params)

    def list(self) -> Iterator[Token]:
        """Yield every token that is not revoked, oldest first."""
        return self._transport.pages("/v1/tokens", Token)

    def revoke(self, token_id: str) -> None:
        """Revoke a token at once. Raise NotFound, AuthError."""
        self._transport.send("DELETE", f"/v1/tokens/{quote(token_id, safe='')}")


class Sessions(Part):
    """Log-ins of browsers, as ``client.sessions``."""

    def list(self) -> Iterator[Session]:
        """Yield your own sessions, newest first; an administrator's are those of everybody."""
        return self._transport.pages("/v1/sessions", Session)

    def revoke(self, session_id: str) -> None:
        """End a session at once. Raise NotFound."""
        self._transport.send("DELETE", f"/v1/sessions/{quote(session_id, safe='')}")


class Projects(Part):
    """Manage projects, as ``client.projects``.

    >>> client.projects.create("vision", max_workers=8, max_queued=100)  # doctest: +SKIP
    """

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
        return self._transport.post("/v1/projects", Project, body, repeatable=True)

    def list(self) -> Iterator[Project]:
        """Yield every project by name, with its quotas and usage."""
        return self._transport.pages("/v1/projects", Project)

    def get(self, name: str) -> Project:
        """Return one project. Raise NotFound, AuthError."""
        return self._transport.get(f"/v1/projects/{quote(name, safe='')}", Project)

    def delete(self, name: str) -> None:
        """Delete a project. Raise Conflict if it still has runs or tokens, NotFound, AuthError."""
        self._transport.send("DELETE", f"/v1/projects/{quote(name, safe='')}")


class Audit(Part):
    """The audit log, as ``client.audit``; for administrators."""

    def list(self, *, token_id: str | None = None) -> Iterator[AuditEntry]:
        """Yield calls that changed something or were refused, newest first. Pages are fetched
        lazily.

        Args:
            token_id: only calls of this token.
        """
        return self._transport.pages("/v1/audit", AuditEntry, {"token_id": token_id})


class ServiceStorage(Part):
    """The storage of the service, as ``client.storage``; for administrators."""

    def status(self) -> StorageStatus:
        """Compare the storage with the database. Raise AuthError."""
        return self._transport.get("/v1/storage", StorageStatus)

    def adopt(self) -> StorageAdoption:
        """Make the service continue with the storage that is there, without data that it lacks.
        Raise AuthError, Unavailable."""
        return self._transport.post("/v1/storage/adopt", StorageAdoption, repeatable=True)


# ---------------------------------------------------------------- alerts

# Alerts of projects: ``client.alerts``; for administrators.

_RECENT = 200


class Alerts(Part):
    """Manage alerts, as ``client.alerts``.

    >>> client.alerts.create(                                               # doctest: +SKIP
    ...     "on-call", when="failed", format="slack", url="https://hooks.slack.com/services/…")
    """

    def create(
        self,
        name: str,
        *,
        when: AlertWhen,
        format: AlertFormat,
        project: str = "default",
        url: str | None = None,
        routing_key: str | None = None,
        addresses: Sequence[str] | None = None,
        more_than: int | None = None,
        stalled_s: float | None = None,
    ) -> Alert:
        """Create an alert.

        Args:
            name: display name, part of every message.
            when: ``failed``, ``finished``, ``recovered``, ``straggler`` or ``stalled``.
            format: ``slack``, ``teams``, ``pagerduty``, ``email`` or ``json``.
            project: project whose runs it watches.
            url: where to send to; not for ``email``.
            routing_key: for ``pagerduty``.
            addresses: recipients, for ``email``.
            more_than: for ``recovered``: recoveries within an hour that are not reported yet.
            stalled_s: for ``stalled``: seconds without a step.

        Raises InvalidSpec for invalid arguments, AuthError if you are not an administrator.
        """
        given: dict[str, Any] = {
            "url": url,
            "routing_key": routing_key,
            "addresses": None if addresses is None else list(addresses),
            "more_than": more_than,
            "stalled_s": stalled_s,
        }
        body = {"project": project, "name": name, "when": when, "format": format}
        body |= {field: value for field, value in given.items() if value is not None}
        return self._transport.post("/v1/alerts", Alert, body)

    def list(self, project: str | None = None) -> Iterator[Alert]:
        """Yield every alert, or those of one project, oldest first, without secrets."""
        return self._transport.pages("/v1/alerts", Alert, {"project": project})

    def delete(self, alert_id: str) -> None:
        """Delete an alert and its messages. Raise NotFound, AuthError."""
        self._transport.send("DELETE", self._path(alert_id))

    def test(self, alert_id: str, *, timeout_s: float = 60.0) -> AlertDelivery:
        """Send a test message, and return what became of it. Raise NotFound, AuthError, WaitTimeout
        if the service has not tried within ``timeout_s`` seconds."""
        sent = self._transport.post(f"{self._path(alert_id)}/test", AlertDelivery)

        def refresh() -> None:
            nonlocal sent
            sent = self._recent(alert_id, sent.id)

        self._wait(
            lambda: sent.state != "waiting",
            refresh,
            lambda: f"message {sent.id} was not tried within {timeout_s:g} s",
            timeout_s,
        )
        return sent

    def deliveries(self, alert_id: str) -> Iterator[AlertDelivery]:
        """Yield the messages of an alert, newest first, with what became of them. Pages are fetched
        lazily."""
        return self._transport.pages(f"{self._path(alert_id)}/deliveries", AlertDelivery)

    def retry(self, alert_id: str, delivery_id: str) -> AlertDelivery:
        """Send a message again, with the same id. Raise NotFound, AuthError."""
        path = f"{self._path(alert_id)}/deliveries/{quote(delivery_id, safe='')}/retry"
        return self._transport.post(path, AlertDelivery, repeatable=True)

    def _recent(self, alert_id: str, delivery_id: str) -> AlertDelivery:
        for each in itertools.islice(self.deliveries(alert_id), _RECENT):
            if each.id == delivery_id:
                return each
        raise NotFound(f"alert {alert_id} has no delivery {delivery_id} any more")

    def _path(self, alert_id: str) -> str:
        return f"/v1/alerts/{quote(alert_id, safe='')}"


# ---------------------------------------------------------------- nodes

# Manage the nodes of the cluster, as ``client.nodes``.

_SHOWN = 12


class Nodes(Part):
    """Cordon, uncordon and drain nodes; ``client.cluster()`` lists them with their states.

    >>> node = client.nodes.find("3f2a")                             # doctest: +SKIP
    >>> client.nodes.drain(node.id, deadline_s=300, reason="disk")   # doctest: +SKIP
    >>> client.nodes.wait_drained(node.id, timeout_s=300)            # doctest: +SKIP
    """

    def cordon(self, node_id: str, *, reason: str | None = None) -> Node:
        """Place no new ranks on a node; its current ranks stay. Raise NotFound, Conflict for a dead
        node, AuthError."""
        return self._order(node_id, "cordon", {"reason": reason})

    def uncordon(self, node_id: str, *, reason: str | None = None) -> Node:
        """Allow ranks on a cordoned or draining node again. Raise NotFound, AuthError."""
        return self._order(node_id, "uncordon", {"reason": reason})

    def drain(
        self, node_id: str, *, deadline_s: float | None = None, reason: str | None = None
    ) -> Node:
        """Make ranks save, leave a node and move to others. Return at once; ``wait_drained`` waits.

        Args:
            node_id: whole id of the node; ``find`` returns it for a prefix.
            deadline_s: seconds from now at which the node will be removed, shown with the node.
            reason: free text, shown with the node.

        Raises NotFound, Conflict for a dead node, AuthError.
        """
        return self._order(node_id, "drain", {"reason": reason, "deadline_s": deadline_s})

    def get(self, node_id: str) -> Node:
        """Return one node by its whole id. Raise NotFound; Unavailable if Ray does not respond."""
        for node in self._cluster().nodes:
            if node.id == node_id:
                return node
        raise NotFound(f"node {node_id} is not in the cluster")

    def find(self, prefix: str) -> Node:
        """Return the node whose id starts with ``prefix``. Raise NotFound, UsageError if there are
        several, Unavailable if Ray does not respond."""
        nodes = self._cluster().nodes
        found = [node for node in nodes if prefix and node.id.startswith(prefix)]
        exact = [node for node in found if node.id == prefix]
        if len(exact or found) > 1:
            raise UsageError(
                f"{prefix!r} matches {len(found)} nodes ({_names(found)}); give more digits of the "
                "id"
            )
        if not found:
            known = f"; the cluster has {_names(nodes)}" if nodes else ""
            raise NotFound(f"no node id starts with {prefix!r}{known}")
        return (exact or found)[0]

    def wait_drained(self, node_id: str, timeout_s: float | None = None) -> Node:
        """Wait until every rank has left a draining node. Return it, also if it died.

        Keep waiting while the service or Ray is unreachable for a while. Raises WaitTimeout after
        ``timeout_s`` seconds, with the runs that are still there; Conflict if the node is not being
        drained, or no longer; Unavailable if service or Ray stay unreachable.
        """
        node: Node | None = None

        def fetch() -> None:
            nonlocal node
            node = self.get(node_id)

        def drained() -> bool:
            if node is None or node.state == "DRAINING":
                return False
            if node.state not in ("DRAINED", "DEAD"):
                raise Conflict(f"node {node_id} is {node.state}, not draining; drain it first")
            return True

        def late() -> str:
            there = (
                f"ranks of {', '.join(node.runs)}"
                if node is not None and node.runs
                else "no run that this token can see"
            )
            return f"node {node_id} is not drained after {timeout_s:g} s; on it: {there}"

        self._wait(drained, fetch, late, timeout_s)
        assert node is not None
        return node

    def _order(self, node_id: str, order: str, body: dict[str, Any]) -> Node:
        given = {name: value for name, value in body.items() if value is not None}
        path = f"/v1/cluster/nodes/{quote(node_id, safe='')}/{order}"
        return self._transport.post(path, Node, given, repeatable=True)

    def _cluster(self) -> ClusterInfo:
        info = self._transport.get("/v1/cluster", ClusterInfo)
        if not info.available:
            raise Unavailable("Ray does not respond, so its nodes are unknown; try again")
        return info


def _names(nodes: tuple[Node, ...] | list[Node]) -> str:
    return ", ".join(node.id[:_SHOWN] for node in nodes)
