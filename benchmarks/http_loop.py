"""A load of HTTP that costs its own process little: kept connections, requests as bytes, answers not looked into."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

Ask = Callable[[], tuple[str, str, bytes]]
"""Method, path with query, and JSON body of the next request."""


class Connection:
    """One kept connection to a service on this machine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: Mapping[str, str]) -> None:
        self._reader, self._writer = reader, writer
        self._head = "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "Host: x\r\n"

    @classmethod
    async def open(cls, port: int, headers: Mapping[str, str]) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port), headers)

    async def request(self, method: str, path: str, body: bytes) -> int:
        """The answer's status; its body is read and let go."""
        about = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        self._writer.write(f"{method} {path} HTTP/1.1\r\n{self._head}{about}\r\n".encode() + body)
        head = await self._reader.readuntil(b"\r\n\r\n")
        status, length = int(head[9:12]), 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line[15:])
        if length:
            await self._reader.readexactly(length)
        return status

    async def stream(self, path: str) -> AsyncIterator[bytes]:
        """Lines of a stream of events as they come."""
        self._writer.write(f"GET {path} HTTP/1.1\r\n{self._head}Accept: text/event-stream\r\n\r\n".encode())
        while line := await self._reader.readline():
            yield line

    def close(self) -> None:
        self._writer.close()


async def closed_loop(
    port: int, headers: Mapping[str, str], clients: int, ask: Ask, seconds: float, status: int
) -> Sequence[float]:
    """Seconds that each answer took, of ``clients`` that ask again at once. Raises AssertionError for another ``status``."""
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

    await asyncio.gather(*(client() for _ in range(clients)))
    return latencies


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
