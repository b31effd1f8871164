"""Migrations make exactly the tables that the code works with."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

import service.annexes.registry  # noqa: F401  the tables of annexes
from service.db.engine import Database, DatabaseOfAnotherVersion
from service.db.tables import metadata
from tests.support.postgres_server import PostgresServer


def test_migrated_tables_equal_the_metadata(database_url: str) -> None:
    database = Database(database_url)
    database.migrate()
    with database.read() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        assert compare_metadata(context, metadata) == []
        assert set(inspect(connection).get_table_names()) == {*metadata.tables, "alembic_version"}
    database.close()


def test_migrating_again_changes_nothing(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'e.db'}")
    database.migrate()
    with database.write() as connection:
        connection.execute(
            text(
                "INSERT INTO tokens (id, name, role, sha256, created_at) "
                "VALUES ('t', 'n', 'admin', 'h', 0)"
            )
        )
    database.migrate()
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM tokens")).scalar_one() == 1
    database.close()


def test_replicas_that_start_at_once_migrate_one_after_the_other(
    postgresql: PostgresServer,
) -> None:
    with postgresql.database("template0") as url, ThreadPoolExecutor(4) as pool:
        databases = [Database(url) for _ in range(4)]
        list(pool.map(Database.migrate, databases))
        databases[0].probe()
        for database in databases:
            database.close()


def test_a_migration_may_stand_still_for_longer_than_a_request(
    postgresql: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, timeouts = text("SHOW idle_in_transaction_session_timeout"), []
    upgrade = command.upgrade

    def look_and_upgrade(config: Config, revision: str) -> None:
        timeouts.append(config.attributes["connection"].execute(asked).scalar_one())
        upgrade(config, revision)

    monkeypatch.setattr(command, "upgrade", look_and_upgrade)
    with postgresql.database("template0") as url:
        database = Database(url)
        database.migrate()
        with database.write() as connection:
            timeouts.append(connection.execute(asked).scalar_one())
        database.close()
    assert timeouts == ["1min", "4s"]


def test_tables_of_a_version_that_is_not_known_are_left_alone(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'e.db'}")
    database.migrate()
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseOfAnotherVersion, match=r"e\.db.*9999.*Start the version"):
        database.migrate()
    with database.read() as connection:
        found = connection.execute(text("SELECT version_num FROM alembic_version"))
        assert found.scalar_one() == "9999"
    database.close()


def test_tables_that_changed_without_a_new_revision_are_refused(database_url: str) -> None:
    database = Database(database_url)
    database.migrate()
    with database.write() as connection:
        connection.execute(text("ALTER TABLE runs DROP COLUMN notes"))
        connection.execute(text("DROP TABLE storage_identity"))
    with pytest.raises(DatabaseOfAnotherVersion, match=r"lacks .*Nothing was changed.*runbook"):
        database.migrate()
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
