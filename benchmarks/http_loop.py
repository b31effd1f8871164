"""A load of HTTP that costs its own process little: kept connections, requests as bytes, answers
not looked into."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import cast

import uvloop

Ask = Callable[[], tuple[str, str, bytes]]
"""Method, path with query, and JSON body of the next request."""


def head_of(headers: Mapping[str, str]) -> str:
    """What every request of a connection begins with, behind its first line."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "Host: x\r\n"


class Connection(asyncio.Protocol):
    """One kept connection to a service on this machine, for one request after the other."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._head = head_of(headers)
        self._transport: asyncio.WriteTransport | None = None
        self._answer: asyncio.Future[int] | None = None
        self._begun = b""
        """An answer's head as far as it came."""
        self._status, self._missing = 0, 0
        """Of an answer whose head is whole: its status, and how many bytes of its body are still to
        come."""

    @classmethod
    async def open(cls, port: int, headers: Mapping[str, str]) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: cls(headers), "127.0.0.1", port
        )
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    async def request(self, method: str, path: str, body: bytes) -> int:
        """The answer's status; its body is counted and let go."""
        assert self._transport is not None
        about = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(
            f"{method} {path} HTTP/1.1\r\n{self._head}{about}\r\n".encode() + body
        )
        return await self._answer

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        else:
            head, end, body = (self._begun + data).partition(b"\r\n\r\n")
            if not end:
                self._begun = head
                return
            self._begun, self._status, self._missing = b"", int(head[9:12]), -len(body)
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    self._missing += int(line[15:])
        if not self._missing and self._answer is not None:
            self._answer.set_result(self._status)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the service closed the connection"))

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()


async def lines_of_stream(port: int, headers: Mapping[str, str], path: str) -> AsyncIterator[bytes]:
    """Lines of a stream of events as they come, over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"GET {path} HTTP/1.1\r\n{head_of(headers)}Accept: text/event-stream\r\n\r\n".encode()
    )
    try:
        while line := await reader.readline():
            yield line
    finally:
        writer.close()


def closed_loop(
    port: int, headers: Mapping[str, str], clients: int, ask: Ask, seconds: float, status: int
) -> Sequence[float]:
    """Seconds that each answer took, of ``clients`` that ask again at once. Raises AssertionError
    for another ``status``."""
    latencies: list[float] = []
    give_up = time.perf_counter() + seconds

    async def client() -> None:
        connection = await Connection.open(port, headers)
        while (began := time.perf_counter()) < give_up:
            method, path, body = ask()
            found = await connection.request(method, path, body)
            latencies.append(time.perf_counter() - began)
            assert found == status, f"{method} {path} answered {found}"
        connection.close()

    async def together() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    uvloop.run(together())
    return latencies


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
