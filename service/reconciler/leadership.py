"""The lease that lets one process at a time reconcile a database. Each write checks its fence."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from typing import Final

import structlog
from sqlalchemy import Connection

from service.db.errors import DatabaseError
from service.db.lease import Lease, LeaseLost, LeaseStore

LEASE_NAME: Final = "reconciler"
RENEW_S: Final = 1.0
"""Seconds between two renewals, and between two tries of a standby."""

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
        """Whether this process holds the lease."""
        return self._lease is not None

    def check(self, connection: Connection) -> None:
        """Guard a write of this process's reconciler. Raises LeaseLost if another process leads."""
        if self._lease is None:
            raise LeaseLost(f"{LEASE_NAME}: another process leads")
        self._lease.check(connection)

    async def hold(self) -> bool:
        """Take the lease, or renew it if due. Return whether this process leads.

        Raises DatabaseError.
        """
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
        """Renew the lease in the middle of a tick.

        If another process has held it since, it is lost, even if it is free again: the facts of
        this tick are out of date. Raises DatabaseError.
        """
        held = self._lease
        if held is None:
            return
        found = await asyncio.to_thread(self._leases.take, LEASE_NAME, self._holder)
        if self._lease is held and found != held:
            self._lease = None
            log.info("another process has reconciled meanwhile; dropping this tick's work")

    async def release(self) -> None:
        """Give the lease back, so that another process takes over at once."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            await asyncio.to_thread(self._leases.release, lease)
        except DatabaseError as exc:
            log.warning("the lease could not be given back; it expires by itself", problem=str(exc))
