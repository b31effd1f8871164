"""Alerts of projects: ``client.alerts``; for administrators."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from everstep.client.follow import Patience, wait_until
from everstep.client.transport import Transport
from everstep.errors import NotFound
from everstep.wire.alerts import Alert, AlertDelivery, AlertFormat, AlertWhen

_RECENT = 200


class Alerts:
    """Manage alerts, as ``client.alerts``.

    >>> client.alerts.create(                                               # doctest: +SKIP
    ...     "on-call", when="failed", format="slack", url="https://hooks.slack.com/services/…")
    """

    def __init__(self, transport: Transport, patience: Patience) -> None:
        self._transport = transport
        self._patience = patience

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
        return self._transport.parse(self._transport.send("POST", "/v1/alerts", body=body), Alert)

    def list(self, project: str | None = None) -> Iterator[Alert]:
        """Yield every alert, or those of one project, oldest first, without secrets."""
        return self._transport.pages("/v1/alerts", Alert, {"project": project})

    def delete(self, alert_id: str) -> None:
        """Delete an alert and its messages. Raise NotFound, AuthError."""
        self._transport.send("DELETE", self._path(alert_id))

    def test(self, alert_id: str, *, timeout_s: float = 60.0) -> AlertDelivery:
        """Send a test message, and return what became of it. Raise NotFound, AuthError, WaitTimeout
        if the service has not tried within ``timeout_s`` seconds."""
        sent = self._transport.parse(
            self._transport.send("POST", f"{self._path(alert_id)}/test"), AlertDelivery
        )

        def refresh() -> None:
            nonlocal sent
            sent = self._recent(alert_id, sent.id)

        wait_until(
            lambda: sent.state != "waiting",
            refresh,
            lambda: f"message {sent.id} was not tried within {timeout_s:g} s",
            self._transport.timing,
            self._patience,
            timeout_s=timeout_s,
        )
        return sent

    def deliveries(self, alert_id: str) -> Iterator[AlertDelivery]:
        """Yield the messages of an alert, newest first, with what became of them. Pages are fetched
        lazily."""
        return self._transport.pages(f"{self._path(alert_id)}/deliveries", AlertDelivery)

    def retry(self, alert_id: str, delivery_id: str) -> AlertDelivery:
        """Send a message again, with the same id. Raise NotFound, AuthError."""
        path = f"{self._path(alert_id)}/deliveries/{quote(delivery_id, safe='')}/retry"
        return self._transport.parse(
            self._transport.send("POST", path, repeatable=True), AlertDelivery
        )

    def _recent(self, alert_id: str, delivery_id: str) -> AlertDelivery:
        for each in itertools.islice(self.deliveries(alert_id), _RECENT):
            if each.id == delivery_id:
                return each
        raise NotFound(f"alert {alert_id} has no delivery {delivery_id} any more")

    def _path(self, alert_id: str) -> str:
        return f"/v1/alerts/{quote(alert_id, safe='')}"
