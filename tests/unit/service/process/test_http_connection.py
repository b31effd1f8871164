"""Clients that begin a request and do not end it, and headers without end: nobody has shown a token
yet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from service.process import http
from service.process.http import HttpConnection


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the number of bytes of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(http, "HEADERS_S", 1.0)
    monkeypatch.setattr(http, "BODY_S", 1.0)
    config = uvicorn.Config(echo, port=0, http=HttpConnection, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(60):
        while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0.005)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


async def dripped(port: int, begun: bytes, drip: bytes = b"") -> bytes:
    """Send the beginning of a request, then a bit now and again. Return all that is answered until
    the connection ends. A bit that crosses the end on its way may take the last answer with it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begun)
    answered = bytearray()

    async def read() -> None:
        with contextlib.suppress(ConnectionError):
            while some := await reader.read(1 << 16):
                answered.extend(some)

    answer = asyncio.create_task(read())
    async with asyncio.timeout(60):
        while not answer.done():
            if drip:
                writer.write(drip)
            await asyncio.wait([answer], timeout=0.1)
    writer.close()
    return bytes(answered)


GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"


@pytest.mark.parametrize(
    ("begun", "drip"),
    [
        (b"", b""),
        (GET, b""),
        (GET, b"X-More: 1\r\n"),  # as slowly as it likes, but without end
        (b"\r\n", b"\r\n"),
    ],
)
async def test_headers_that_do_not_come_end_the_connection(
    port: int, begun: bytes, drip: bytes
) -> None:
    answer = await dripped(port, begun, drip)
    assert answer.startswith(b"HTTP/1.1 408 ") or (drip and not answer)


async def test_the_second_request_of_a_connection_has_no_more_time(port: int) -> None:
    answers = await dripped(port, GET + b"\r\n" + GET, b"X-More: 1\r\n")
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert answers.endswith(b"\r\n\r\n0") or b"\r\n\r\n0HTTP/1.1 408 " in answers


async def test_a_body_may_be_slow_and_not_stand_still(port: int) -> None:
    assert await dripped(port, POST) == b"", "its request ends without an answer"
    size = 30
    slow = POST.replace(b"1000000", str(size).encode()) + b"x"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(slow)
    for _ in range(size - 1):  # three times as long as a body may stand still
        await asyncio.sleep(0.1)
        writer.write(b"x")
    async with asyncio.timeout(30):
        assert (await reader.readuntil(str(size).encode() + b"")).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_headers_have_a_size(port: int) -> None:
    endless = GET + b"".join(b"X-%d: %s\r\n" % (number, b"x" * 1000) for number in range(100))
    assert (await dripped(port, endless)).startswith(b"HTTP/1.1 431 ")
    fair = GET + b"X-Long: " + b"x" * 30_000 + b"\r\n\r\n"
    assert (await dripped(port, fair)).startswith(b"HTTP/1.1 200 "), "then it is idle, and ends"
