"""Migrations make exactly the tables that the code works with."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text, update

import service.annexes.registry  # noqa: F401  the tables of annexes
from everstep.spec.parsing import parse_spec
from service.db.engine import Database, DatabaseOfAnotherVersion
from service.db.events import EventStore
from service.db.run_lookup import RunFilter
from service.db.runs import RunStore
from service.db.tables import events, metadata
from tests.support.api_service import spec
from tests.support.postgres_server import PostgresServer

pytest_plugins = ["tests.support.database_fixtures"]


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


def test_runs_of_a_sweep_stay_and_carry_its_tag(old_database: Database) -> None:
    store = RunStore(old_database, lambda: 5.0)
    ids = [store.create(parse_spec(spec(tags=tags)), "tok")[0].id for tags in ({}, {"study": "a"})]
    for run_id in ids:
        store.request_stop(run_id, "cancel")
    with old_database.write() as connection:
        connection.execute(
            text(
                "INSERT INTO sweeps (id, name, project, status, spec, created_by, created_at) "
                "VALUES ('sweep_1', 'lr', 'default', 'RUNNING', '{}', 'tok', 1)"
            )
        )
        connection.execute(
            text(
                "INSERT INTO sweep_runs (sweep_id, number, params, spec, run_id, rung, results) "
                "VALUES ('sweep_1', 7, '{}', '{}', :id, 0, '[]')"
            ),
            {"id": ids[0]},
        )
        for table in ("runs", "transitions"):
            connection.execute(
                text(
                    f"UPDATE {table} SET reason_code = 'cancelled_by_sweep' WHERE reason_code = :c"
                ),
                {"c": "cancelled_by_user"},
            )
        connection.execute(text("UPDATE runs SET sweep_id = 'sweep_1'"))
        reason = {"code": "cancelled_by_sweep", "message": "Cancelled by sweep sweep_1."}
        connection.execute(
            update(events)
            .where(events.c.kind == "status", events.c.seq > 2)
            .values(data={"from": "QUEUED", "to": "CANCELLED", "reason": reason})
        )
    old_database.migrate()
    rows = [store.get(run_id) for run_id in ids]
    assert [row and row.tags for row in rows] == [
        {"study": "sweep_1", "trial": "7"},
        {"study": "a", "everstep.study": "sweep_1"},
    ]
    assert [run.id for run in store.find(RunFilter(tags=(("study", "sweep_1"),)), 9)] == ids[:1]
    assert {row and row.reason and row.reason.code for row in rows} == {"cancelled_by_user"}
    for run_id in ids:
        assert store.transitions([run_id])[run_id][-1].reason_code == "cancelled_by_user"
        last = EventStore(old_database).of_kinds(run_id, ["status"])[-1]
        assert last.data["reason"] == {**reason, "code": "cancelled_by_user"}
    with old_database.read() as connection:
        assert not {"sweeps", "sweep_runs"} & set(inspect(connection).get_table_names())
