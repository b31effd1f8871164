"""A hint for SQLite that few rows match a condition; by default it expects all values to be equally
frequent."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import ColumnElement
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from service.db.tables import runs
from service.model.states import LIVE


class Few(FunctionElement[Any]):
    """A condition that few rows match. Without the hint, SQLite would read all runs to find the few
    that have not ended.

    Its type is not declared boolean: SQLite would then compare it with 1, and use no index.
    """

    name = "few"
    inherit_cache = True

    def __init__(self, condition: ColumnElement[bool]) -> None:
        super().__init__(condition)


@compiles(Few)
def _itself(element: Few, compiler: SQLCompiler, **options: Any) -> str:
    return compiler.process(element.clauses, **options)


@compiles(Few, "sqlite")
def _unlikely(element: Few, compiler: SQLCompiler, **options: Any) -> str:
    return f"unlikely({compiler.process(element.clauses, **options)})"


IS_LIVE: Final = Few(runs.c.status.in_(sorted(LIVE)))
"""Condition on ``runs``: queued, or submitted and not ended."""
