"""A run's transitions as one JSON value beside its row: separate rows would repeat the run, or need
a second query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import JSON, Column
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from service.db.tables import runs
from service.model.rows import TransitionRow


class StatusChanges(FunctionElement[Any]):
    """JSON of the transitions, unordered: arrays for ``changes_of``, or null if there are none."""

    name = "status_changes"
    inherit_cache = True
    type = JSON()

    def __init__(self, run_id: Column[str]) -> None:
        super().__init__(run_id)


STATUS_CHANGES: Final = StatusChanges(runs.c.id)


@compiles(StatusChanges, "postgresql")
def _in_postgresql(element: StatusChanges, compiler: SQLCompiler, **options: Any) -> str:
    change = (
        "json_build_array(c.seq, c.from_status, c.to_status, c.at, c.reason_code, c.reason_message)"
    )
    return (
        f"(SELECT json_agg({change}) FROM transitions AS c WHERE c.run_id = "
        f"{compiler.process(element.clauses, **options)})"
    )


@compiles(StatusChanges, "sqlite")
def _in_sqlite(element: StatusChanges, compiler: SQLCompiler, **options: Any) -> str:
    # SQLite's JSON keeps 15 digits of a number; a time has more.
    change = (
        "json_array(c.seq, c.from_status, c.to_status, printf('%!.17g', c.at), c.reason_code, "
        "c.reason_message)"
    )
    changes = f"SELECT json_group_array({change}) FROM transitions AS c"
    return f"({changes} WHERE c.run_id = {compiler.process(element.clauses, **options)})"


def changes_of(run_id: str, found: Sequence[Sequence[Any]] | None) -> list[TransitionRow]:
    """Return the rows for a value of STATUS_CHANGES, oldest first."""
    rows = sorted(found or (), key=lambda change: int(change[0]))
    return [
        TransitionRow(run_id, seq, before, to, float(at), code, message)
        for seq, before, to, at, code, message in rows
    ]
