"""A named lease: one holder at a time, and a fence that refuses writes of an old holder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from service.db.engine import DatabaseError, Store
from service.db.tables import leases

LEASE_S: Final = 5.0
"""A holder that has not renewed for this long can be replaced."""


class LeaseLost(DatabaseError):
    """Another process now holds the lease; nothing of this transaction was written."""


@dataclass(frozen=True)
class Lease:
    """The right to write, as long as no one has the name with a higher fence."""

    name: str
    holder: str
    fence: int

    def check(self, connection: Connection) -> None:
        """Verify that the lease is still held, and lock it until this transaction ends. Raises
        LeaseLost."""
        query = select(leases.c.fence).where(leases.c.name == self.name).with_for_update(read=True)
        if connection.execute(query).scalar_one_or_none() != self.fence:
            raise LeaseLost(
                f"{self.name}: another process replaced {self.holder}, which did not renew in time"
            )


class LeaseStore(Store):
    """Leases by the database's clock, so that replicas need not agree on the time. SQLite uses
    ``clock``."""

    def take(self, name: str, holder: str) -> Lease | None:
        """Take or renew a lease for ``LEASE_S`` seconds; None if another process holds it.

        A holder that renews keeps its fence; a new holder gets a higher one.
        """
        try:
            with self._database.write() as connection:
                return self._take(connection, name, holder)
        except IntegrityError:
            return None  # another process inserted the row at the same time, and holds it

    def _take(self, connection: Connection, name: str, holder: str) -> Lease | None:
        found = connection.execute(
            select(leases).where(leases.c.name == name).with_for_update()
        ).one_or_none()
        now = self._now(connection)  # after the lock: a renewal meanwhile does not lie ahead of it
        if found is None:
            connection.execute(
                insert(leases).values(name=name, holder=holder, fence=1, expires_at=now + LEASE_S)
            )
            return Lease(name, holder, 1)
        # One that expires later than any lease may is of a clock that was set back since.
        if found.holder != holder and now < found.expires_at <= now + LEASE_S:
            return None
        fence = found.fence + (found.holder != holder)
        renewed = (
            update(leases)
            .where(leases.c.name == name)
            .values(holder=holder, fence=fence, expires_at=now + LEASE_S)
        )
        connection.execute(renewed)
        return Lease(name, holder, fence)

    def release(self, lease: Lease) -> None:
        """Release the lease, so that another process can take it at once."""
        held = (leases.c.name == lease.name, leases.c.fence == lease.fence)
        with self._database.write() as connection:
            connection.execute(update(leases).where(*held).values(expires_at=0.0))

    def _now(self, connection: Connection) -> float:
        if self._database.is_sqlite:
            return self.clock()
        return float(
            connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one()
        )
