"""Inserts that may conflict with another replica: the database resolves them, and neither fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Dialect, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import Insert as PostgresInsert
from sqlalchemy.dialects.sqlite import Insert as SqliteInsert


def insert_missing(connection: Connection, table: Table, row: Mapping[str, Any]) -> bool:
    """Insert a row unless its key exists; return whether it was inserted.

    Waits for a transaction that inserts the same key, and respects its commit.
    """
    statement = insert_into(table, connection.dialect).values(dict(row)).on_conflict_do_nothing()
    done = connection.execute(statement, execution_options={"preserve_rowcount": True})
    return done.rowcount > 0


def replace_row(connection: Connection, table: Table, row: Mapping[str, Any]) -> None:
    """Insert a row, or replace the one with the same primary key. Of two at once, the later one
    stays."""
    statement = insert_into(table, connection.dialect).values(dict(row))
    keys = [column.name for column in table.primary_key]
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=keys,
            set_={name: statement.excluded[name] for name in row if name not in keys},
        )
    )


def insert_into(table: Table, dialect: Dialect) -> PostgresInsert | SqliteInsert:
    """Return an insert with conflict handling, in the database's dialect."""
    if dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)
