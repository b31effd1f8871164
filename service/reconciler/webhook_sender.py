"""The sender of webhooks: only to allowed origins, signed, retried for a day, delaying no run."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import httpx
import structlog

from service.db.audit import Notification, NotificationStore, with_failure
from service.db.events import EventStore
from service.submission_rules.allowed import NotifyRule

NOTIFY_INTERVAL_S: Final = 1.0
GIVE_UP_S: Final = 24 * 3600.0

log = structlog.get_logger(__name__)


class Notifier:
    """Sends due notifications.

    Args:
        store: Stored notifications.
        events: Histories of runs, for the failures that a notification names.
        rule: Allowed origins. A notification to another origin is dropped.
        clock: Unix seconds.
        transport: httpx's transport, for tests.
        public_url: Base URL of the run pages; None for no links.
    """

    def __init__(
        self,
        store: NotificationStore,
        events: EventStore,
        rule: NotifyRule,
        clock: Callable[[], float] = time.time,
        transport: httpx.AsyncBaseTransport | None = None,
        public_url: str | None = None,
    ) -> None:
        self._store = store
        self._events = events
        self._rule = rule
        self._clock = clock
        self._transport = transport
        self._public_url = public_url

    async def work(self) -> None:
        """Send the due notifications in parallel, and record each result. Raises DatabaseError."""
        due = await asyncio.to_thread(self._due)
        if not due:
            return
        async with client(self._transport) as http:
            await asyncio.gather(*(self._send(http, each) for each in due))

    def _due(self) -> list[Notification]:
        return [
            each
            if each.num_tries
            else with_failure(each, self._events.failures(each.run_id, each.seq))
            for each in self._store.due()
        ]

    async def _send(self, http: httpx.AsyncClient, notification: Notification) -> None:
        if not self._rule.allows(notification.url):
            log.warning(
                "dropped a webhook whose origin is not allowed",
                run_id=notification.run_id,
                url=notification.url,
            )
            await asyncio.to_thread(self._store.forget, notification)
            return
        problem = await self._problem(http, notification)
        now = self._clock()
        if problem is None:
            await asyncio.to_thread(self._store.forget, notification)
        elif now - notification.created_at >= GIVE_UP_S:
            log.warning(
                "dropped a webhook after a day of failures",
                run_id=notification.run_id,
                url=notification.url,
                problem=problem,
            )
            await asyncio.to_thread(self._store.forget, notification)
        else:
            pause_s = retry_pause_s(notification.num_tries)
            log.info(
                "a webhook failed; trying again",
                run_id=notification.run_id,
                url=notification.url,
                problem=problem,
                in_s=pause_s,
            )
            await asyncio.to_thread(self._store.postpone, notification, now + pause_s)

    async def _problem(self, http: httpx.AsyncClient, notification: Notification) -> str | None:
        """Send one notification. Return why it failed, or None. Only the status is read."""
        facts = json.loads(notification.body)
        if self._public_url:
            facts["url"] = f"{self._public_url}/runs/{notification.run_id}"
        body = json.dumps(facts).encode()
        headers = {
            SIGNATURE_HEADER: signature(self._rule.secret, int(self._clock()), body),
            DELIVERY_HEADER: f"{notification.run_id}/{notification.seq}",
        }
        return (await post(http, notification.url, body, headers)).error


# ---------------------------------------------------------------- http post

TIMEOUT_S: Final = 5.0

_FIRST_PAUSE_S: Final = 2.0

_LONGEST_PAUSE_S: Final = 3600.0

SIGNATURE_HEADER: Final = "Everstep-Signature"

DELIVERY_HEADER: Final = "Everstep-Delivery"

_MOST_ANSWER_BYTES: Final = 2000


@dataclass(frozen=True)
class Outcome:
    """What became of one try to deliver a message."""

    error: str | None = None
    """Why it was not delivered; None if it was."""
    status: int | None = None
    """HTTP or SMTP status; None without an answer."""
    answer: str | None = None
    """First characters of the answer."""
    wait_s: float = 0.0
    """How long the receiver wants to be left alone."""


def retry_pause_s(num_tries: int, wait_s: float = 0.0) -> float:
    """Return the seconds until a message that failed is sent again.

    Args:
        num_tries: Tries before the one that failed; each doubles the pause, up to an hour.
        wait_s: How long the receiver wants to be left alone.
    """
    pause_s = _FIRST_PAUSE_S * 2.0 ** min(num_tries, 16)
    return min(_LONGEST_PAUSE_S, max(pause_s, wait_s))


def signature(secret: str, at: int, body: bytes) -> str:
    """Return ``t=UNIX_SECONDS,v1=HEX``, the HMAC-SHA256 of ``UNIX_SECONDS.BODY``.

    The time lets receivers refuse replays.
    """
    digest = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


def client(transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """Return a client for calls to the outside. No redirects, which may lead anywhere, and no proxy
    or credentials of the environment."""
    return httpx.AsyncClient(
        verify=_certificates(),
        timeout=TIMEOUT_S,
        follow_redirects=False,
        trust_env=False,
        transport=transport,
    )


@cache
def _certificates() -> ssl.SSLContext:
    """Return the authorities that are trusted; loading them takes long enough to delay requests."""
    return httpx.create_ssl_context(trust_env=False)


async def post(
    http: httpx.AsyncClient,
    url: httpx.URL | str,
    body: bytes,
    headers: Mapping[str, str],
    extensions: Mapping[str, Any] | None = None,
) -> Outcome:
    """Send JSON. Only the status decides; some of the answer is kept for whoever reads the error.

    Any status but 2xx is an error, and so is no complete answer within ``2 * TIMEOUT_S`` seconds.
    """
    kind = {"Content-Type": "application/json"}
    try:
        async with (
            asyncio.timeout(2 * TIMEOUT_S),
            http.stream(
                "POST",
                url,
                content=body,
                headers={**kind, **headers},
                extensions=dict(extensions or {}),
            ) as answer,
        ):
            text = "" if answer.is_success else await _beginning(answer)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as exc:
        return Outcome(f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__)
    if answer.is_success:
        return Outcome(None, answer.status_code)
    wait_s = _seconds(answer.headers.get("Retry-After"))
    return Outcome(f"it answered {answer.status_code}", answer.status_code, text, wait_s)


async def _beginning(answer: httpx.Response) -> str:
    found = b""
    async for chunk in answer.aiter_bytes():
        found += chunk
        if len(found) >= _MOST_ANSWER_BYTES:
            break
    return found[:_MOST_ANSWER_BYTES].decode(errors="replace")


def _seconds(retry_after: str | None) -> float:
    known = retry_after is not None and retry_after.isascii() and retry_after.isdigit()
    return min(float(retry_after), _LONGEST_PAUSE_S) if known and retry_after else 0.0
