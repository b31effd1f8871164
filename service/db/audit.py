"""The audit log: who changed what, when and from where. Entries are written in the transaction of
the change.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, insert, update

from service.db.engine import Store
from service.db.tables import audit_log
from service.model.rows import AuditRow, Role

_PATH_CHARS: Final = 512
_SHORT_CHARS: Final = 64
_INSERT: Final = insert(audit_log)


@dataclass
class AuditedCall:
    """One call, completed as it is processed. A context variable carries it, also into threads."""

    method: str
    path: str
    address: str | None
    token_id: str | None = None
    token_name: str | None = None
    role: Role | None = None
    target: str | None = None
    """Id of what was created or changed."""
    status: int = 200
    seq: int | None = None
    """Position in the log; None until it is written."""
    written_as: tuple[str | None, int] | None = None
    """Target and status with which it was written."""

    def columns(self, at: float) -> dict[str, Any]:
        return {
            "at": at,
            "token_id": self.token_id,
            "token_name": self.token_name,
            "role": self.role,
            "address": self.address[:_SHORT_CHARS] if self.address else None,
            "method": self.method[:8],
            "path": self.path[:_PATH_CHARS],
            "target": self.target[:_SHORT_CHARS] if self.target else None,
            "status": self.status,
        }


_current: ContextVar[AuditedCall | None] = ContextVar("audit_entry", default=None)


def begin_entry(entry: AuditedCall | None) -> None:
    """Attribute writes in this context to the entry from here on."""
    _current.set(entry)


def current_entry() -> AuditedCall | None:
    return _current.get()


def note_target(target: str) -> None:
    """Set the target of the current call, if it is audited."""
    entry = _current.get()
    if entry is not None:
        entry.target = target


class AuditStore(Store):
    """The audit log."""

    def join(self, connection: Connection) -> Callable[[], None] | None:
        """Write the current entry into its call's transaction; return a function to call after the
        commit.

        A rollback removes the entry, and a retry writes it again.
        """
        entry = _current.get()
        if entry is None or entry.seq is not None or entry.token_id is None:
            return None
        result = connection.execute(_INSERT, entry.columns(self.clock()))
        key = result.inserted_primary_key
        assert key is not None
        written_as, seq = (entry.target, entry.status), int(key[0])

        def committed() -> None:
            entry.seq, entry.written_as = seq, written_as

        return committed

    def complete(self, entry: AuditedCall) -> None:
        """Write the entry once the response is known, if the call wrote nothing; correct target and
        status if they changed."""
        if entry.seq is None:
            with self._database.write() as connection:
                key = connection.execute(_INSERT, entry.columns(self.clock())).inserted_primary_key
            assert key is not None
            entry.seq, entry.written_as = int(key[0]), (entry.target, entry.status)
        elif entry.written_as != (entry.target, entry.status):
            answered = update(audit_log).where(audit_log.c.seq == entry.seq)
            with self._database.write() as connection:
                connection.execute(answered.values(target=entry.target, status=entry.status))

    def page(
        self, limit: int, before: int | None = None, token_id: str | None = None
    ) -> list[AuditRow]:
        """Return entries, newest first: those before the entry ``before``, and of one token, if
        given."""
        query = AuditRow.select(audit_log).order_by(audit_log.c.seq.desc()).limit(limit)
        if before is not None:
            query = query.where(audit_log.c.seq < before)
        if token_id is not None:
            query = query.where(audit_log.c.token_id == token_id)
        return self._rows(AuditRow, query)
