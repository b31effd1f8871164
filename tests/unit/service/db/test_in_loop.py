"""What the event loop asks PostgreSQL for itself: in turns, in transactions that end, over
connections that may break; and a server that restarts in the middle of one."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest
import pytest_asyncio
from sqlalchemy import make_url, text

from everstep.spec.parsing import parse_spec
from everstep.wire import RunStatus
from service.db import connections
from service.db.connections import LOOKS, WRITES
from service.db.engine import Database, DatabaseUnavailable
from service.db.lease import IdempotencyKey
from service.db.run_lookup import RunFilter
from service.db.runs import RunStore
from service.model.run_rows import RunRow
from service.model.states import TransitionConflict
from tests.support import postgres_server
from tests.support.api_service import spec
from tests.support.postgres_server import PostgresServer

MANY = 3 * (LOOKS + WRITES)
OTHERS = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


@pytest_asyncio.fixture
async def database(postgresql: PostgresServer) -> AsyncIterator[Database]:
    with postgresql.database() as url:
        database = Database(url)
        database.migrate()
        yield database
        await database.close_loop()
        database.close()


def counted(database: Database, condition: str) -> int:
    with database.autocommit() as connection:
        return int(
            connection.execute(text(f"SELECT count(*) {OTHERS} AND {condition}")).scalar_one()
        )


def made(runs: RunStore, name: str) -> RunRow:
    return runs.create(parse_spec(spec(name=name)), "tok_test")[0]


async def test_many_write_at_once_and_leave_no_transaction_open(database: Database) -> None:
    runs = RunStore(database)
    found = await asyncio.gather(
        *(database.do_in_loop(partial(made, runs, f"r{n}"), writes=True) for n in range(MANY))
    )
    assert (
        {row.name for row in runs.find(RunFilter(), MANY + 1)}
        == {row.name for row in found}
        == {f"r{n}" for n in range(MANY)}
    )
    looked = await asyncio.gather(
        *(database.do_in_loop(partial(runs.get, row.id)) for row in found)
    )
    assert looked == found
    assert counted(database, "state LIKE 'idle in transaction%'") == 0
    assert 1 <= counted(database, "true") <= LOOKS + WRITES + 1


async def test_what_fails_is_undone_and_the_connection_goes_on(database: Database) -> None:
    runs = RunStore(database)

    def half() -> None:
        with database.write() as connection:
            connection.execute(text("INSERT INTO projects (name, created_at) VALUES ('half', 1)"))
            raise KeyError("in the middle")

    for _ in range(MANY):
        with pytest.raises(KeyError, match="in the middle"):
            await database.do_in_loop(half, writes=True)
    assert counted(database, "state LIKE 'idle in transaction%'") == 0
    with database.autocommit() as connection:
        assert (
            connection.execute(
                text("SELECT count(*) FROM projects WHERE name = 'half'")
            ).scalar_one()
            == 0
        )
    run = await database.do_in_loop(partial(made, runs, "after"), writes=True)
    assert await database.do_in_loop(partial(runs.get, run.id)) == run


async def test_connections_that_broke_are_replaced(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = RunStore(database)
    run = await database.do_in_loop(partial(made, runs, "kept"), writes=True)

    def break_all() -> None:
        with database.autocommit() as connection:
            connection.execute(text(f"SELECT pg_terminate_backend(pid) {OTHERS}")).all()

    break_all()
    with pytest.raises(DatabaseUnavailable):  # used a moment ago, it is not tried out
        await database.do_in_loop(partial(runs.get, run.id))
    assert await database.do_in_loop(partial(runs.get, run.id)) == run
    monkeypatch.setattr(connections, "IDLE_S", 0.0)
    break_all()
    assert await database.do_in_loop(partial(runs.get, run.id)) == run


async def test_requests_that_are_cancelled_give_their_turns_back(database: Database) -> None:
    def slow() -> None:
        with database.autocommit() as connection:
            connection.execute(text("SELECT pg_sleep(30)"))

    for _ in range(2):
        asked = [asyncio.create_task(database.do_in_loop(slow)) for _ in range(LOOKS)]
        async with asyncio.timeout(20):
            sleeping = "query LIKE '%pg_sleep%' AND state = 'active'"
            while await asyncio.to_thread(counted, database, sleeping) < LOOKS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for task in asked:
            task.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError)
            for end in await asyncio.gather(*asked, return_exceptions=True)
        )
    async with asyncio.timeout(20):
        assert await database.do_in_loop(partial(RunStore(database).get, "run_none")) is None


async def test_a_read_does_not_hold_the_loop_up(database: Database) -> None:
    with pytest.raises(AssertionError, match="event loop"):
        await database.do_in_loop(RunStore(database).heads)


async def test_a_database_whose_encoding_is_sql_ascii_returns_text(
    postgresql: PostgresServer,
) -> None:
    with postgresql.database("template0 ENCODING 'SQL_ASCII' LOCALE 'C'") as url:
        database = Database(url)
        try:
            database.migrate()
            run = made(RunStore(database), "twelve")
            assert await database.do_in_loop(partial(RunStore(database).get, run.id)) == run
        finally:
            await database.close_loop()
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
