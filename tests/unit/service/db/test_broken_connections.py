"""PostgreSQL that restarts in the middle of a transaction, is a standby, or has an odd encoding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import make_url, text

from everstep.spec.parsing import parse_spec
from service.db.engine import Database, DatabaseUnavailable
from service.db.runs import RunStore
from service.model.run_rows import RunRow
from tests.support import postgres_server
from tests.support.api_service import spec
from tests.support.postgres_server import PostgresServer


def made(runs: RunStore, name: str) -> RunRow:
    return runs.create(parse_spec(spec(name=name)), "tok_test")[0]


def test_a_standby_is_a_database_that_is_away(postgresql: PostgresServer) -> None:
    """Both for who connects to it, and for connections whose server takes no more writes."""
    with postgresql.database() as url:
        database, later = Database(url), Database(url)
        made(RunStore(database), "before")
        with database.read() as connection:
            name = make_url(url).database
            connection.execute(
                text(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
            )
        with pytest.raises(DatabaseUnavailable, match="read-only"):
            made(RunStore(later), "at a standby")
        with pytest.raises(DatabaseUnavailable, match="read-only"), database.write() as connection:
            connection.execute(text("SET TRANSACTION READ ONLY"))
            connection.execute(text("DELETE FROM runs"))
        database.close()
        later.close()


def test_a_database_whose_encoding_is_sql_ascii_returns_text(postgresql: PostgresServer) -> None:
    with postgresql.database("template0 ENCODING 'SQL_ASCII' LOCALE 'C'") as url:
        database = Database(url)
        database.migrate()
        run = made(RunStore(database), "twelve")
        assert RunStore(database).get(run.id) == run
        database.close()


# ---------------------------------------------------------------- a server that restarts


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    programs = postgres_server.binaries()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install -y postgresql")
    with postgres_server.running(programs, durable=True) as server:
        yield server


def test_a_server_that_restarts_in_a_transaction_has_written_nothing(
    own_server: PostgresServer,
) -> None:
    with own_server.database() as url:
        database = Database(url)
        runs = RunStore(database)
        kept = made(runs, "kept")

        def write_half() -> None:
            with database.write() as connection:
                connection.execute(text("UPDATE runs SET name = 'half'"))
                own_server.crash()
                connection.execute(text("UPDATE runs SET name = 'whole'"))

        with pytest.raises(DatabaseUnavailable):
            write_half()
        with pytest.raises(DatabaseUnavailable):
            runs.get(kept.id)
        own_server.restart()
        assert runs.get(kept.id) == kept, "over a new connection"
        assert made(runs, "after").name == "after"
        database.close()
