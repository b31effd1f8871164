"""One reconciler at a time behind one database: by a lease, whose fence is checked in every
transaction that it writes."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from typing import Final

import structlog
from sqlalchemy import Connection

from service.db.engine import DatabaseError
from service.db.lease import Lease, LeaseLost, LeaseStore

LEASE_NAME: Final = "reconciler"
RENEW_S: Final = 1.0
"""Between two renewals, and between two tries of a process that stands by."""

log = structlog.get_logger(__name__)


class Leadership:
    """Whether this process reconciles."""

    def __init__(self, leases: LeaseStore) -> None:
        self._leases = leases
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"[:128]
        self._lease: Lease | None = None
        self._asked_at = float("-inf")

    @property
    def leads(self) -> bool:
        return self._lease is not None

    def check(self, connection: Connection) -> None:
        """The guard of this process's reconciling writes. Raises LeaseLost where another process
        leads."""
        if self._lease is None:
            raise LeaseLost(f"{LEASE_NAME}: another process leads")
        self._lease.check(connection)

    async def hold(self) -> bool:
        """Take the lease, or renew it where that is due. Whether this process leads now. Raises
        DatabaseError."""
        asked_at = time.monotonic()
        if asked_at - self._asked_at < RENEW_S:
            return self.leads
        self._asked_at = asked_at
        led = self.leads
        self._lease = await asyncio.to_thread(self._leases.take, LEASE_NAME, self._holder)
        if self.leads != led:
            log.info(
                "this process reconciles now"
                if self.leads
                else "another process reconciles now; standing by"
            )
        return self.leads

    async def renew(self) -> None:
        """Renew the lease that is held, in the middle of what is done under it. Where others have
        had it since, it is lost, also if it could be had again: what was seen before is no longer
        true. Raises DatabaseError."""
        held = self._lease
        if held is None:
            return
        found = await asyncio.to_thread(self._leases.take, LEASE_NAME, self._holder)
        if self._lease is held and found != held:
            self._lease = None
            log.info("another process has reconciled meanwhile; what was begun is given up")

    async def release(self) -> None:
        """Let another process take over at once."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            await asyncio.to_thread(self._leases.release, lease)
        except DatabaseError as exc:
            log.warning("the lease could not be given back; it ends by itself", problem=str(exc))
