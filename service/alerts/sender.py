"""Sends the messages of alerts: each in its receiver's format, again and again for a day, and only
from the process that holds the reconciler's lease."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import httpx
import structlog
from pydantic_core import to_json

from everstep.spec.plain_text import printable_lines, written_out
from everstep.wire.alerts import AlertMessage
from service.alerts import formats
from service.alerts.addresses import NotAllowed, reachable
from service.alerts.http_post import (
    DELIVERY_HEADER,
    SIGNATURE_HEADER,
    Outcome,
    client,
    post,
    retry_pause_s,
    signature,
)
from service.alerts.mail import send
from service.db.alert_deliveries import DeliveryStore
from service.db.alert_incidents import IncidentStore
from service.model.alert_rows import AlertRow, DeliveryRow
from service.model.mail_server import MailServer
from service.submission_rules.webhooks import NotifyRule

OVER_TIME_S: Final = 5.0
"""Interval of the check of what begins and ends as time passes."""
PRUNE_S: Final = 3600.0
_MOST_CHARS: Final = 1000
_MASK: Final = "[secret]"

log = structlog.get_logger(__name__)


class AlertSender:
    """Sends due messages.

    Args:
        deliveries: Stored messages.
        incidents: Applies rules over time.
        rule: Origins that may be called although they are not public, and the key of signatures.
        mail: The operator's mail server; None if there is none.
        public_url: Base URL of the run pages; None for no links.
        clock: Unix seconds.
        transport: httpx's transport, for tests.
    """

    def __init__(
        self,
        deliveries: DeliveryStore,
        incidents: IncidentStore,
        rule: NotifyRule,
        mail: MailServer | None = None,
        public_url: str | None = None,
        clock: Callable[[], float] = time.time,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._deliveries = deliveries
        self._incidents = incidents
        self._rule = rule
        self._mail = mail
        self._public_url = public_url
        self._clock = clock
        self._transport = transport
        self._applied_at = self._pruned_at = float("-inf")

    async def work(self) -> None:
        """Apply rules over time, then send what is due in parallel. Raises DatabaseError."""
        now = self._clock()
        if now - self._applied_at >= OVER_TIME_S:
            self._applied_at = now
            await asyncio.to_thread(self._incidents.work)
        if now - self._pruned_at >= PRUNE_S:
            self._pruned_at = now
            await asyncio.to_thread(self._deliveries.prune)
        due = await asyncio.to_thread(self._deliveries.due)
        if due:
            async with client(self._transport) as http:
                await asyncio.gather(*(self._try(http, *each) for each in due))

    async def _try(self, http: httpx.AsyncClient, delivery: DeliveryRow, alert: AlertRow) -> None:
        try:
            outcome = await self._sent(http, delivery, alert)
        except Exception as exc:  # One message that cannot be made must not hold up the others.
            log.exception("a message of an alert could not be made", alert_id=alert.id)
            outcome = Outcome(f"the message could not be made: {type(exc).__name__}")
        outcome = without_secrets(outcome, secrets_of(alert))
        now = self._clock()
        values: dict[str, Any] = {
            "status": outcome.status,
            "answer": outcome.answer or None,
            "error": outcome.error,
        }
        if outcome.error is None:
            values |= {"state": "delivered", "finished_at": now}
        elif now >= delivery.give_up_at:
            values |= {"state": "failed", "finished_at": now}
        else:
            values["next_at"] = now + retry_pause_s(delivery.num_tries, outcome.wait_s)
        if outcome.error is not None:
            log.warning(
                "a message of an alert was not delivered",
                alert_id=alert.id,
                delivery_id=delivery.id,
                problem=outcome.error,
                tries_again="next_at" in values,
            )
        await asyncio.to_thread(self._deliveries.record, delivery, values)

    async def _sent(
        self, http: httpx.AsyncClient, delivery: DeliveryRow, alert: AlertRow
    ) -> Outcome:
        message = AlertMessage.model_validate({**delivery.message, "id": delivery.id})
        if self._public_url and delivery.run_id is not None:
            url = f"{self._public_url}/runs/{delivery.run_id}"
            message = message.model_copy(
                update={"run": message.run.model_copy(update={"url": url})}
            )
        if alert.format == "email":
            if self._mail is None:
                return Outcome("this service has no mail server; set EVERSTEP_SMTP_URL")
            mail = formats.email(message, self._mail.sender, alert.target["addresses"])
            return await asyncio.to_thread(send, self._mail, mail)
        try:
            place, headers, extensions = await reachable(alert.target["url"], self._rule)
        except NotAllowed as exc:
            return Outcome(f"not sent: the URL {exc}")
        except OSError as exc:
            return Outcome(f"the host's name does not resolve: {exc.strerror or exc}")
        body = body_of(message, alert)
        headers[DELIVERY_HEADER] = delivery.id
        if alert.format == "json" and self._rule.secret:
            headers[SIGNATURE_HEADER] = signature(self._rule.secret, int(self._clock()), body)
        return await post(http, place, body, headers, extensions)


def body_of(message: AlertMessage, alert: AlertRow) -> bytes:
    """Return the body of a POST in the alert's format."""
    match alert.format:
        case "slack":
            return to_json(formats.slack(message))
        case "teams":
            return to_json(formats.teams(message))
        case "pagerduty":
            return to_json(formats.pagerduty(message, alert.target["routing_key"]))
        case _:
            return message.model_dump_json().encode()


def secrets_of(alert: AlertRow) -> list[str]:
    """Return the texts that no answer, error or log may show."""
    url = str(alert.target.get("url", ""))
    parts = [url, httpx.URL(url).raw_path.decode("ascii")] if url else []
    return [each for each in (*parts, alert.target.get("routing_key", "")) if len(each) > 1]


def without_secrets(outcome: Outcome, secrets: Iterable[str]) -> Outcome:
    """Return the outcome with secrets masked, cut, and without characters that steer a
    terminal."""

    def shown(text: str | None) -> str | None:
        if text is None:
            return None
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, _MASK)
        return printable_lines(written_out(text))[:_MOST_CHARS]

    return replace(outcome, error=shown(outcome.error), answer=shown(outcome.answer))
