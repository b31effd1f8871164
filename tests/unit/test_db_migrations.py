"""Migrations make exactly the tables that the code works with."""

from __future__ import annotations

from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from service.db.engine import Database
from service.db.tables import metadata


def test_migrated_tables_equal_the_metadata(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'e.db'}")
    database.migrate()
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []
        assert set(inspect(connection).get_table_names()) == {*metadata.tables, "alembic_version"}
    database.close()


def test_migrating_again_changes_nothing(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'e.db'}")
    database.migrate()
    with database.write() as connection:
        connection.execute(text("INSERT INTO tokens VALUES ('t', 'n', 'admin', NULL, 'h', 0, NULL, NULL)"))
    database.migrate()
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM tokens")).scalar_one() == 1
    database.close()


def test_sqlite_is_durable_and_does_not_block_readers(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'e.db'}")
    database.migrate()
    with database.read() as connection:
        pragmas = {
            name: connection.execute(text(f"PRAGMA {name}")).scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    database.close()
