"""The sender of webhooks: only to allowed origins, signed, retried for a day, delaying no run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Final

import httpx
import structlog

from service.alerts.sender import (
    DELIVERY_HEADER,
    SIGNATURE_HEADER,
    client,
    post,
    retry_pause_s,
    signature,
)
from service.db.audit import Notification, NotificationStore
from service.submission_rules.packages import NotifyRule

GIVE_UP_S: Final = 24 * 3600.0

log = structlog.get_logger(__name__)


class Notifier:
    """Sends due notifications.

    Args:
        store: Stored notifications.
        rule: Allowed origins. A notification to another origin is dropped.
        clock: Unix seconds.
        transport: httpx's transport, for tests.
        public_url: Base URL of the run pages; None for no links.
    """

    def __init__(
        self,
        store: NotificationStore,
        rule: NotifyRule,
        clock: Callable[[], float] = time.time,
        transport: httpx.AsyncBaseTransport | None = None,
        public_url: str | None = None,
    ) -> None:
        self._store = store
        self._rule = rule
        self._clock = clock
        self._transport = transport
        self._public_url = public_url

    async def work(self) -> None:
        """Send the due notifications in parallel, and record each result. Raises DatabaseError."""
        due = await asyncio.to_thread(self._store.due)
        if not due:
            return
        async with client(self._transport) as http:
            await asyncio.gather(*(self._send(http, each) for each in due))

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
