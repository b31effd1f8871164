"""A connection to PostgreSQL that is cut after any message of the server: a request is answered 201
or 503 and made once, a tick fails as a tick may, what was acknowledged is there, and the pool is
whole."""

from __future__ import annotations

import asyncio
import itertools
import re
import select
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from sqlalchemy import make_url

from service.db.engine import DatabaseError
from service.db.run_lookup import RunFilter
from tests.support.api_service import ApiService, spec
from tests.support.fake_ray import FakeRay, serving
from tests.support.postgres_server import PostgresServer
from tests.support.reconciler_world import World, world

pytest_plugins = ["tests.support.reconciler_fixtures"]
FATAL = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to administrator command\0\0"
MODES = (b"E" + struct.pack("!I", len(FATAL) + 4) + FATAL, b"")
"""What a client reads last: what the server says when it is stopped, or nothing."""
END_S = 0.05
"""How long after these words the connection ends, as it does over a network."""
MANY = 20


class CuttingProxy:
    """Stands between clients and the server. Once armed, it passes on a number of the server's
    messages, then ends the connection of the next one."""

    def __init__(self, port: int) -> None:
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._left: int | None = None
        self._last_words = b""
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, num_messages: int, last_words: bytes) -> None:
        with self._lock:
            self._left, self._last_words = num_messages, last_words

    def disarm(self) -> bool:
        """Return whether a connection was cut since it was armed."""
        with self._lock:
            was_cut, self._left = self._left is None, None
        return was_cut

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        pending = b""
        with client, socket.create_connection(self._server) as server:
            while True:
                readable, _, _ = select.select([client, server], [], [])
                source = readable[0]
                try:
                    data = source.recv(1 << 16)
                except ConnectionError:
                    return
                if not data:
                    return
                if source is client:
                    server.sendall(data)
                    continue
                pending += data
                passed, pending, is_cut = self._passed(pending)
                try:
                    client.sendall(passed)
                except ConnectionError:
                    return
                if is_cut:
                    threading.Event().wait(END_S if self._last_words else 0)
                    return

    def _passed(self, pending: bytes) -> tuple[bytes, bytes, bool]:
        """Return what to pass on, what to keep, and whether the connection ends then."""
        passed = b""
        with self._lock:
            while len(pending) >= 5:
                length = 1 + struct.unpack("!I", pending[1:5])[0]
                if len(pending) < length:
                    break
                if self._left == 0:
                    self._left = None
                    return passed + self._last_words, b"", True
                if self._left is not None:
                    self._left -= 1
                passed, pending = passed + pending[:length], pending[length:]
        return passed, pending, False


@pytest.fixture
def proxied(postgresql: PostgresServer) -> Iterator[tuple[CuttingProxy, str]]:
    with postgresql.database() as url:
        proxy = CuttingProxy(int(make_url(url).port or 0))
        plain = {"sslmode": "disable", "gssencmode": "disable"}  # else one answer has no length
        behind = make_url(url).set(port=proxy.port).update_query_dict(plain)
        yield proxy, behind.render_as_string(False)


@pytest_asyncio.fixture
async def service(tmp_path: Path, proxied: tuple[CuttingProxy, str]) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path, database_url=proxied[1]) as service:
        yield service


@pytest.mark.parametrize("last_words", MODES, ids=["fatal", "silent"])
async def test_a_submission_is_answered_201_or_503_wherever_its_connection_is_cut(
    service: ApiService, proxied: tuple[CuttingProxy, str], last_words: bytes
) -> None:
    proxy, _ = proxied
    await service.create(name="warm")
    answered: list[int] = []
    acknowledged: set[str] = set()

    async def submit(number: int) -> httpx.Response:
        key = {"Idempotency-Key": f"k{number}"}
        return await service.http.post("/v1/runs", json=spec(name=f"r{number}"), headers=key)

    for num_messages in itertools.count():
        proxy.arm(num_messages, last_words)
        answer = await submit(num_messages)
        was_cut = proxy.disarm()
        answered.append(answer.status_code)
        assert answer.status_code in (201, 503), (num_messages, answer.text)
        if answer.status_code == 201:
            acknowledged.add(answer.json()["id"])
        if not was_cut:
            break
    assert answered[-1] == 201 and answered.count(503) >= MANY, answered
    after = await asyncio.gather(
        *(service.http.post("/v1/runs", json=spec(name=f"after{n}")) for n in range(MANY)),
        *(service.http.get("/v1/runs/run_00000000none") for _ in range(MANY)),
    )
    assert [answer.status_code for answer in after] == [201] * MANY + [404] * MANY
    again = {(await submit(number)).json()["id"] for number in range(len(answered))}
    found = await asyncio.to_thread(service.runs.find, RunFilter(search="r"), 500)
    made = {run.id for run in found if re.fullmatch(r"r\d+", run.name)}
    assert acknowledged <= again == made, "also those whose answer was lost, and each once"


@pytest.mark.usefixtures("whole_ticks")
@pytest.mark.parametrize("last_words", MODES, ids=["fatal", "silent"])
async def test_a_tick_fails_as_a_tick_may_wherever_its_connection_is_cut(
    tmp_path: Path, proxied: tuple[CuttingProxy, str], last_words: bytes
) -> None:
    proxy, url = proxied
    with serving(FakeRay()) as ray:
        async with world(tmp_path, ray.url, url) as here:
            await cut_ticks(here, proxy, last_words)


async def cut_ticks(here: World, proxy: CuttingProxy, last_words: bytes) -> None:
    run = here.create()
    num_failed = 0
    for num_messages in itertools.count():
        proxy.arm(num_messages, last_words)
        try:
            await here.reconciler.tick()
        except DatabaseError:
            num_failed += 1
        if not proxy.disarm():
            break
    assert num_failed >= MANY
    await here.reconciler.tick()
    assert here.get(run.id).submission == 1
    await here.reconciler.close()
    pool = here.database._engine.pool
    async with asyncio.timeout(20):  # work beside the ticks may still be in a thread
        while pool.checkedout():  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.01)
