"""Log lines over HTTP: an order that stays, whoever reads and however often they reconnect."""

from __future__ import annotations

import asyncio

import pytest

from everstep.wire import LogLine
from service.api import log_views
from storage.logs import rank_logs
from storage.logs.rank_logs import LogRecord, RankLogWriter
from storage.run_dir import RunDir
from tests.support.api_service import NOON, ApiService
from tests.unit.service.api.test_api_events import Stream


class Ranks:
    """Ranks that log."""

    def __init__(self, api: ApiService, run_id: str) -> None:
        self.run_dir = RunDir(api.storage, run_id)

    def log(
        self, attempt: int, rank: int | None, *lines: tuple[float, str], submission: int = 1
    ) -> None:
        with RankLogWriter(self.run_dir, submission, attempt, rank) as writer:
            writer.write([LogRecord(NOON + at, "INFO", message) for at, message in lines])


async def lines(api: ApiService, run_id: str, query: str = "") -> list[LogLine]:
    return [
        LogLine.model_validate(item)
        for item in (await api.get(f"/v1/runs/{run_id}/logs{query}"))["items"]
    ]


async def test_lines_of_all_ranks_and_attempts(api: ApiService) -> None:
    run_id = await api.create()
    assert await lines(api, run_id) == []
    ranks = Ranks(api, run_id)
    ranks.log(1, 0, (1, "a"), (3, "c"))
    ranks.log(1, 1, (2, "b"))
    ranks.log(2, 0, (4, "d"))
    ranks.log(0, None, (0, "driver"))
    found = await lines(api, run_id)
    assert [(line.seq, line.message, line.attempt, line.rank) for line in found] == [
        (1, "driver", 0, None),
        (2, "a", 1, 0),
        (3, "b", 1, 1),
        (4, "c", 1, 0),
        (5, "d", 2, 0),
    ]
    assert [line.message for line in await lines(api, run_id, "?rank=0")] == ["a", "c", "d"]
    assert [line.message for line in await lines(api, run_id, "?attempt=1")] == ["a", "b", "c"]
    assert [line.message for line in await lines(api, run_id, "?attempt=2&rank=1")] == []
    assert [line.message for line in await lines(api, run_id, "?after=3")] == ["c", "d"]
    page = await api.get(f"/v1/runs/{run_id}/logs?limit=2")
    assert page["next_cursor"] == "2"
    assert [
        item["seq"] for item in (await api.get(f"/v1/runs/{run_id}/logs?limit=2&cursor=2"))["items"]
    ] == [3, 4]


async def test_a_late_line_takes_a_late_place(api: ApiService) -> None:
    run_id = await api.create()
    ranks = Ranks(api, run_id)
    ranks.log(1, 0, (5, "first seen"))
    assert [line.message for line in await lines(api, run_id)] == ["first seen"]
    ranks.log(1, 1, (1, "older, and seen later"))
    assert [(line.seq, line.message) for line in await lines(api, run_id)] == [
        (1, "first seen"),
        (2, "older, and seen later"),
    ]


async def test_old_lines_are_read_again_in_their_places(
    api: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_views, "_RING_LINES", 10)
    monkeypatch.setattr(log_views, "_BATCH_LINES", 7)
    run_id = await api.create()
    ranks = Ranks(api, run_id)
    written: list[str] = []
    for batch in range(6):
        # Every batch has older times than the one before: storage alone would now tell another
        # order.
        ranks.log(
            1, batch % 3, *((100 - batch + index / 10, f"{batch}-{index}") for index in range(9))
        )
        written += [
            line.message for line in await lines(api, run_id, f"?after={len(written)}&limit=5000")
        ]
    assert len(set(written)) == 54
    for limit in (4, 7, 5000):
        again: list[LogLine] = []
        cursor: str | None = "0"
        while cursor is not None:
            page = await api.get(f"/v1/runs/{run_id}/logs?limit={limit}&cursor={cursor}")
            again += [LogLine.model_validate(item) for item in page["items"]]
            cursor = page["next_cursor"]
        assert [line.seq for line in again] == list(range(1, 55))
        assert [line.message for line in again] == written, (
            "in the places that they had when they were first seen"
        )


async def test_lines_that_rotation_took_are_left_out_and_the_others_keep_their_places(
    api: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_views, "_RING_LINES", 5)
    monkeypatch.setattr(log_views, "_BATCH_LINES", 7)
    monkeypatch.setattr(rank_logs, "PART_BYTES", 600)
    run_id = await api.create()
    ranks = Ranks(api, run_id)
    ranks.log(1, 1, (0, "of a quiet rank"))
    first: dict[int, str] = {}
    for number in range(80):
        ranks.log(1, 0, (1 + number, f"line {number}"))
        for line in await lines(api, run_id, f"?after={max(first, default=0)}&limit=5000"):
            first[line.seq] = line.message
    assert list(first) == list(range(1, len(first) + 1)) and "line 79" in first.values()
    again: dict[int, str] = {}
    cursor: str | None = "0"
    while cursor is not None:
        page = await api.get(f"/v1/runs/{run_id}/logs?limit=4&cursor={cursor}")
        again |= {item["seq"]: item["message"] for item in page["items"]}
        cursor = page["next_cursor"]
    assert (
        again.items() <= first.items()
        and "of a quiet rank" in again.values()
        and "line 0" not in again.values()
    )
    assert [seq for seq in first if seq not in again] == list(
        range(2, 2 + len(first) - len(again))
    ), "the oldest alone are gone"


async def test_following_waits_while_queued_and_ends_with_the_run(api: ApiService) -> None:
    run_id = await api.create()
    stream = Stream(api.http, f"/v1/runs/{run_id}/logs?follow=true")
    reading = asyncio.create_task(stream.read())
    ranks = Ranks(api, run_id)
    ranks.log(0, None, (0, "driver"))
    await stream.wait_for(1)
    ranks.log(1, 0, (1, "a"))
    ranks.log(1, 1, (1, "b"))
    await stream.wait_for(3)
    other = Stream(api.http, f"/v1/runs/{run_id}/logs?follow=true", **{"Last-Event-ID": "2"})
    following = asyncio.create_task(other.read())
    await other.wait_for(1)
    assert not reading.done()
    ranks.log(2, 0, (2, "last words"))
    api.runs.request_stop(run_id, "cancel")
    async with asyncio.timeout(60):
        await asyncio.gather(reading, following)
    assert [(item["seq"], item["message"]) for item in stream.data] == [
        (1, "driver"),
        (2, "a"),
        (3, "b"),
        (4, "last words"),
    ]
    assert stream.ids == [1, 2, 3, 4]
    assert other.data == stream.data[2:], "both see one order"


async def test_a_stream_without_follow_ends_with_what_there_is(api: ApiService) -> None:
    run_id = await api.create()
    Ranks(api, run_id).log(1, 0, *((index, str(index)) for index in range(1200)))
    stream = Stream(api.http, f"/v1/runs/{run_id}/logs?rank=0")
    async with asyncio.timeout(60):
        await stream.read()
    assert stream.ids == list(range(1, 1201))


async def test_a_deleted_runs_lines_are_forgotten(api: ApiService) -> None:
    run_id = await api.create()
    Ranks(api, run_id).log(1, 0, (1, "a"))
    assert len(await lines(api, run_id)) == 1
    await api.http.post(f"/v1/runs/{run_id}/cancel")
    stream = Stream(api.http, f"/v1/runs/{run_id}/logs?follow=true&after=1")
    async with asyncio.timeout(60):
        await stream.read()
    assert stream.ids == []
    assert (await api.http.delete(f"/v1/runs/{run_id}")).status_code == 204
    assert (await api.http.get(f"/v1/runs/{run_id}/logs")).status_code == 404
