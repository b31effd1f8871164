"""Streams and downloads that a client opens and does not read: how much they hold, how many there
may be, and when they end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from service.api import streams
from storage.run_dir import RunDir
from tests.support.api_service import ApiService, Journal
from tests.unit.service.api.test_api_events import Stream


class Unread:
    """Streams that a client opens and never reads, with as little room as the kernel allows."""

    def __init__(self, api: ApiService, path: str, token: str, count: int = 1) -> None:
        request = (
            f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
            "Accept: text/event-stream\r\n\r\n"
        )
        self.sockets = []
        for _ in range(count):
            opened = socket.socket()
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            opened.connect(("127.0.0.1", int(api.url.rpartition(":")[2])))
            opened.sendall(request.encode())
            self.sockets.append(opened)

    def close(self) -> None:
        for each in self.sockets:
            each.close()


async def open_streams(api: ApiService, count: int) -> None:
    async with asyncio.timeout(60):
        while api.followers.num_open != count:  # noqa: ASYNC110  the server's own tasks
            await asyncio.sleep(0.02)


def add_large_events(
    api: ApiService, run_id: str, journal: Journal, count: int, num_bytes: int
) -> int:
    """Add events to a run's history; return the seq of the last one."""
    pad = "x" * num_bytes
    row = api.apply(
        run_id, [journal.event(EventKind.EPOCH_HOOK_DONE, pad=pad) for _ in range(count)]
    )
    return row.last_seq


async def test_what_a_stream_holds_for_a_client_that_does_not_read_is_one_piece(
    api: ApiService,
) -> None:
    run_id, journal = await api.running()
    add_large_events(api, run_id, journal, 200, 20_000)
    from_database = [piece async for piece in first(api.feed.follow(run_id, 0), 40)]
    follower = api.feed.follow(run_id, 0)
    await anext(follower)  # the run is followed: what comes now is kept for its followers
    last = add_large_events(api, run_id, journal, 80, 20_000)
    await api.feed.tick()
    from_feed = [piece async for piece in first(api.feed.follow(run_id, last - 75), 15)]
    await follower.aclose()
    for pieces in (from_database, from_feed):
        assert max(map(len, pieces)) <= streams.PIECE_BYTES + 21_000
        assert min(map(len, pieces[1:-1])) > streams.PIECE_BYTES / 2, "not one by one either"


async def first(pieces: AsyncGenerator[bytes], count: int) -> AsyncIterator[bytes]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece
            count -= 1
            if not count:
                return


async def test_a_client_that_reads_nothing_is_dropped(tmp_path: Path) -> None:
    async with ApiService(tmp_path, unread_s=4.0) as api:
        run_id, journal = await api.running()
        add_large_events(api, run_id, journal, 100, 100_000)
        path = f"/v1/runs/{run_id}/events"
        unread = Unread(api, path, api.token("viewer", "default"), 3)
        reading = Stream(api.http, path)
        task = asyncio.create_task(reading.read())
        try:
            await open_streams(api, 4)
            await open_streams(api, 1)
            assert not task.done(), "who reads stays"
        finally:
            unread.close()
            task.cancel()


@pytest.mark.parametrize(
    "path", ["/v1/runs/{}/events", "/v1/runs/{}/logs?follow=true", "/v1/runs/{}/tensorboard/{}"]
)
async def test_one_caller_has_so_many_streams_and_leaves_some_to_others(
    api: ApiService, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(streams, "MOST_OF_CALLER", 3)
    monkeypatch.setattr(streams, "MOST_STREAMS", 5)
    run_id, _ = await api.running()
    name = "events.out.tfevents.1.everstep.s001"
    run_dir = RunDir(api.storage, run_id)
    run_dir.files.write(run_dir.tensorboard_path(name), b"x" * (8 << 20))
    path = path.format(run_id, name)
    tokens = [api.token("viewer", "default") for _ in range(3)]
    clients = [await api.client(token) for token in tokens]
    for client in clients:
        client.headers["Accept"] = "text/event-stream"
    opened = [Unread(api, path, tokens[0], 3)]
    try:
        await open_streams(api, 3)
        refused = await clients[0].get(path)
        assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
        assert "3 streams and downloads open, of at most 3" in refused.json()["detail"]
        assert refused.headers["Retry-After"]
        assert (await clients[0].get(f"/v1/runs/{run_id}")).status_code == 200
        opened.append(Unread(api, path, tokens[1], 2))
        await open_streams(api, 5)
        for client in clients[1:]:
            assert (await client.get(path)).status_code == 429, "all together have theirs"
        opened.pop(0).close()
        await open_streams(api, 2)
        opened.append(Unread(api, path, tokens[0], 3))
        await open_streams(api, 5)
    finally:
        for each in opened:
            each.close()
