"""Connections to PostgreSQL that break: replaced, also by a server that restarts in the middle of a
transaction, and a commit whose answer is lost."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import make_url, text

from everstep.spec.parsing import parse_spec
from everstep.wire import RunStatus
from service.db.engine import Database, DatabaseUnavailable
from service.db.ids import IdempotencyKey
from service.db.run_lookup import RunFilter
from service.db.runs import RunStore
from service.model.run_rows import RunRow
from service.model.states import TransitionConflict
from tests.support import postgres_server
from tests.support.api_service import spec
from tests.support.postgres_server import PostgresServer

OTHERS = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


def made(runs: RunStore, name: str) -> RunRow:
    return runs.create(parse_spec(spec(name=name)), "tok_test")[0]


def test_connections_that_broke_are_replaced(postgresql: PostgresServer) -> None:
    with postgresql.database() as url:
        database, other = Database(url), Database(url)
        runs = RunStore(database)
        run = made(runs, "kept")
        with other.read() as connection:
            connection.execute(text(f"SELECT pg_terminate_backend(pid) {OTHERS}")).all()
        assert runs.get(run.id) == run
        database.close()
        other.close()


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


class LosesTheAnswer:
    """Stands between a client and the server. Once ``armed``, the answer to the next COMMIT is
    lost, with the connection."""

    def __init__(self, port: int) -> None:
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.armed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._server) as server:
            while True:
                readable, _, _ = select.select([client, server], [], [])
                source = readable[0]
                data = source.recv(1 << 16)
                if not data:
                    return
                (server if source is client else client).sendall(data)
                if source is client and self.armed and b"\x0bCOMMIT\x00" in data:
                    self.armed = False
                    server.recv(1 << 16)  # it has committed
                    return


def test_a_commit_whose_answer_is_lost_is_found_again_and_not_repeated(
    postgresql: PostgresServer,
) -> None:
    with postgresql.database() as url:
        link = LosesTheAnswer(int(make_url(url).port or 0))
        database = Database(make_url(url).set(port=link.port).render_as_string(False))
        runs, wanted = RunStore(database), parse_spec(spec())
        key = IdempotencyKey("tok_a", "key", "body")
        link.armed = True
        with pytest.raises(DatabaseUnavailable):
            runs.create(wanted, "tok_a", key)
        again, is_new = runs.create(wanted, "tok_a", key)
        assert not is_new and [row.id for row in runs.find(RunFilter(), 5)] == [again.id]
        link.armed = True
        with pytest.raises(DatabaseUnavailable):
            runs.claim_submission(again.id, 0)
        with pytest.raises(TransitionConflict):
            runs.claim_submission(again.id, 0)
        found = runs.get(again.id)
        assert found is not None and (found.status, found.submission) == (RunStatus.STARTING, 1)
        database.close()
