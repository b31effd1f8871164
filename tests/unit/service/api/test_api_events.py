"""Events, metrics, attempts, failures and figures of a run over HTTP, as pages and as streams."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Collection
from typing import Any

import httpx
import pytest

from everstep.wire import Event
from everstep.wire.events import EventKind
from service.api import streams as streams_module
from service.runs import history as series_routes
from tests.support.api_service import NOON, ApiService, Journal


class Stream:
    """A follower that collects what a stream sends."""

    def __init__(self, client: httpx.AsyncClient, path: str, **headers: str) -> None:
        self.client = client
        self.path = path
        self.headers = {"Accept": "text/event-stream", **headers}
        self.ids: list[int] = []
        self.data: list[dict[str, Any]] = []
        self.comments = 0
        self._more = asyncio.Event()

    async def read(self, until: int | None = None) -> None:
        """To the stream's end, or until so many events have come."""
        async with self.client.stream("GET", self.path, headers=self.headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for line in answer.aiter_lines():
                self._line(line)
                if until is not None and len(self.data) >= until:
                    return

    def _line(self, line: str) -> None:
        field, _, value = line.partition(": ")
        if field == "id":
            self.ids.append(int(value))
        elif field == "data":
            self.data.append(json.loads(value))
            self._more.set()
        elif line.startswith(":"):
            self.comments += 1
            self._more.set()

    async def wait_for(self, count: int, comments: int = 0) -> None:
        async with asyncio.timeout(15):
            while len(self.data) < count or self.comments < comments:
                self._more.clear()
                await self._more.wait()


def finish(journal: Journal) -> list[Any]:
    return [journal.event(EventKind.FINISHED, outcome="succeeded", reason=None, step=3)]


# ---------------------------------------------------------------- pages


async def test_pages_of_events(api: ApiService) -> None:
    run_id, _ = await api.running()
    everything = [
        Event.model_validate(item) for item in (await api.get(f"/v1/runs/{run_id}/events"))["items"]
    ]
    assert [event.seq for event in everything] == list(range(1, len(everything) + 1))
    assert everything[0].kind == "run_created"
    page = await api.get(f"/v1/runs/{run_id}/events?limit=3")
    assert [item["seq"] for item in page["items"]] == [1, 2, 3] and page["next_cursor"] == "3"
    rest = await api.get(f"/v1/runs/{run_id}/events?cursor=3")
    assert [item["seq"] for item in rest["items"]] == [
        event.seq for event in everything[3:]
    ] and rest["next_cursor"] is None
    assert rest == await api.get(f"/v1/runs/{run_id}/events?after=3")
    assert (await api.get(f"/v1/runs/{run_id}/events?after=999"))["items"] == []


# ---------------------------------------------------------------- streams


async def test_a_stream_follows_to_the_end(api: ApiService) -> None:
    run_id, journal = await api.running()
    stream = Stream(api.http, f"/v1/runs/{run_id}/events")
    reading = asyncio.create_task(stream.read())
    history = len((await api.get(f"/v1/runs/{run_id}/events"))["items"])
    await stream.wait_for(history)
    api.apply(run_id, [journal.steps(2, 3)])
    await stream.wait_for(history + 1)
    api.apply(run_id, finish(journal))
    async with asyncio.timeout(60):
        await reading
    assert stream.ids == list(range(1, history + 4))
    assert [item["seq"] for item in stream.data] == stream.ids
    assert (stream.data[-1]["kind"], stream.data[-1]["data"]["to"]) == ("status", "SUCCEEDED")
    assert stream.data == (await api.get(f"/v1/runs/{run_id}/events"))["items"]


async def test_reconnecting_loses_and_repeats_nothing(api: ApiService) -> None:
    run_id, journal = await api.running()
    seen: list[int] = []

    async def follow() -> None:
        while True:
            stream = Stream(
                api.http,
                f"/v1/runs/{run_id}/events",
                **({"Last-Event-ID": str(seen[-1])} if seen else {}),
            )
            await stream.read(until=3)
            seen.extend(stream.ids[:3])
            if stream.data and stream.data[-1]["data"].get("to") == "SUCCEEDED":
                return

    following = asyncio.create_task(follow())
    for step in range(2, 40):
        api.apply(run_id, [journal.steps(step)])
        await asyncio.sleep(0)
    api.apply(run_id, finish(journal))
    async with asyncio.timeout(60):
        await following
    row = api.runs.get(run_id)
    assert row is not None and seen == list(range(1, row.last_seq + 1))


async def test_a_stream_of_a_run_that_has_ended_ends(api: ApiService) -> None:
    run_id = await api.create()
    await api.http.post(f"/v1/runs/{run_id}/cancel")
    async with asyncio.timeout(60):
        for headers, query, ids in (
            ({}, "", [1, 2, 3]),
            ({"Last-Event-ID": "2"}, "", [3]),
            ({}, "?after=2", [3]),
            ({"Last-Event-ID": "3"}, "?after=1", []),
            ({"Last-Event-ID": "77"}, "", []),
        ):
            stream = Stream(api.http, f"/v1/runs/{run_id}/events{query}", **headers)
            await stream.read()
            assert stream.ids == ids


@pytest.mark.parametrize("last", ["x", "-1", "1.5", "9" * 30])
async def test_a_bad_last_event_id(api: ApiService, last: str) -> None:
    run_id = await api.create()
    answer = await api.http.get(
        f"/v1/runs/{run_id}/events", headers={"Accept": "text/event-stream", "Last-Event-ID": last}
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


async def test_a_silent_stream_has_a_heartbeat(
    api: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module, "HEARTBEAT_S", 0.05)
    run_id = await api.create()
    stream = Stream(api.http, f"/v1/runs/{run_id}/events")
    reading = asyncio.create_task(stream.read())
    await stream.wait_for(2, comments=3)
    reading.cancel()


@pytest.mark.parametrize("end", ["revoked", "expired"])
@pytest.mark.parametrize(
    "path", ["/v1/runs/{}/events", "/v1/runs/{}/logs?follow=true", "/runs/{}/stream"]
)
async def test_a_stream_ends_with_its_token(
    api: ApiService, monkeypatch: pytest.MonkeyPatch, path: str, end: str
) -> None:
    monkeypatch.setattr(streams_module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(streams_module, "CONFIRM_S", 0.05)
    run_id, journal = await api.running()
    token, other = (
        api.token("viewer", "default", expires_at=NOON + 60),
        api.token("viewer", "default"),
    )
    clients = [
        await api.client(each if path.startswith("/v1") else None) for each in (token, other)
    ]
    if not path.startswith("/v1"):
        for client, each in zip(clients, (token, other), strict=True):
            await client.post("/login", data={"token": each})
    theirs, others = [Stream(client, path.format(run_id)) for client in clients]
    reading = [asyncio.create_task(stream.read()) for stream in (theirs, others)]
    for stream in (theirs, others):
        await stream.wait_for(0, comments=3)
    if end == "revoked":
        found = api.tokens.find(token)
        assert found is not None and api.tokens.revoke(found.id)  # as another replica would
    else:
        api.clock.now += 61
    async with asyncio.timeout(30):
        await reading[0]
    before = list(theirs.ids)
    api.apply(run_id, [journal.steps(2)])
    await others.wait_for(0, comments=others.comments + 3)
    assert theirs.ids == before and not reading[1].done()
    reading[1].cancel()


async def test_a_deleted_run_ends_its_streams(api: ApiService) -> None:
    run_id = await api.create()
    stream = Stream(api.http, f"/v1/runs/{run_id}/events")
    reading = asyncio.create_task(stream.read())
    await stream.wait_for(2)
    api.runs.request_stop(run_id, "cancel")
    api.runs.delete(run_id)
    async with asyncio.timeout(60):
        await reading


async def test_closing_the_feed_ends_streams_of_live_runs(api: ApiService) -> None:
    run_id = await api.create()
    streams = [
        Stream(api.http, f"/v1/runs/{run_id}/{path}") for path in ("events", "logs?follow=true")
    ]
    reading = asyncio.gather(*(stream.read() for stream in streams))
    await streams[0].wait_for(2)
    api.feed.close()
    async with asyncio.timeout(60):
        await reading


async def test_who_comes_while_the_feed_looks_is_not_told_that_the_run_is_gone(
    api: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module, "HEARTBEAT_S", 0.05)
    first, second = await api.create(), await api.create()
    followed = Stream(api.http, f"/v1/runs/{first}/events")
    tasks = [asyncio.create_task(followed.read())]
    await followed.wait_for(2)
    looking, go, heads = threading.Event(), threading.Event(), api.events.heads

    def look(run_ids: Collection[str]) -> dict[str, tuple[int, str]]:
        found = heads(run_ids)
        if list(run_ids) == [first]:  # the feed's own look
            looking.set()
            assert go.wait(30)
        return found

    monkeypatch.setattr(api.events, "heads", look)
    assert await asyncio.to_thread(looking.wait, 30)
    late = Stream(api.http, f"/v1/runs/{second}/events")
    tasks.append(asyncio.create_task(late.read()))
    await late.wait_for(2)
    go.set()
    await late.wait_for(2, comments=late.comments + 3)
    assert not tasks[1].done()
    for task in tasks:
        task.cancel()


async def test_large_events_come_in_pages_and_streams_of_bounded_size(api: ApiService) -> None:
    """Ranks' code may write events of megabytes. Whoever reads them gets all, a few at a time."""
    run_id, journal = await api.running()
    path = f"/v1/runs/{run_id}/events"
    follower = Stream(api.http, path)
    following = asyncio.create_task(follower.read())
    await follower.wait_for(1)
    large = [journal.event(EventKind.EPOCH_HOOK_DONE, pad="x" * (3 << 20)) for _ in range(9)]
    api.apply(run_id, large)
    await follower.wait_for(len(large))
    [tail] = api.feed._tails.values()
    assert sum(map(len, tail.frames)) <= 16 << 20, "of all that is kept for followers"
    api.apply(run_id, finish(journal))
    late = Stream(api.http, path)
    async with asyncio.timeout(60):
        await asyncio.gather(following, late.read())
    seqs: list[int] = []
    cursor = None
    while True:
        answer = await api.http.get(
            path, params={"limit": 1000, **({"cursor": cursor} if cursor else {})}
        )
        assert len(answer.content) < (8 << 20) + 10_000
        page = answer.json()
        seqs += [item["seq"] for item in page["items"]]
        if (cursor := page["next_cursor"]) is None:
            break
    row = api.runs.get(run_id)
    assert row is not None and seqs == list(range(1, row.last_seq + 1))
    assert late.ids == seqs and follower.ids == seqs
    assert late.data[-3]["data"]["pad"] == "x" * (3 << 20)


# ---------------------------------------------------------------- figures


async def test_metrics(api: ApiService) -> None:
    run_id, journal = await api.running()
    values = [float("nan") if step == 500 else float(step % 10) for step in range(2, 1002)]
    values[700] = 99.0
    points = [
        {
            "step": step,
            "at": NOON + step,
            "values": {"loss": None if value != value else value, "lr": 0.1},
        }
        for step, value in enumerate(values, start=2)
    ]
    api.apply(
        run_id,
        [
            journal.event(EventKind.METRICS, points=points),
            journal.event(EventKind.EVALUATED, step=1001, metrics={"f1": 0.5}),
        ],
    )
    series = (await api.get(f"/v1/runs/{run_id}/metrics?max_points=50"))["series"]
    assert set(series) == {"loss", "lr", "val_f1"}
    assert len(series["loss"]) <= 50
    assert series["loss"][0] == [1, NOON, 0.5] and series["loss"][-1][0] == 1001
    assert [702, NOON + 702, 99.0] in series["loss"]
    assert [500, NOON + 500, None] in series["loss"]
    some = (await api.get(f"/v1/runs/{run_id}/metrics?names=lr,nothing,lr&max_points=10000"))[
        "series"
    ]
    assert (set(some), len(some["lr"]), some["nothing"]) == ({"lr", "nothing"}, 1000, [])
    assert (await api.get(f"/v1/runs/{run_id}/metrics?names="))["series"] == {}


async def test_all_series_of_an_answer_have_a_bounded_number_of_points(
    api: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series_routes, "_MOST_POINTS", 120)
    run_id, journal = await api.running()
    values = {"loss": 0.5, "lr": 0.1, 'a "name" \u00e9': 2.0, "not_finite": None}
    api.apply(run_id, [journal.steps(*range(2, 400), **values)])
    series = (await api.get(f"/v1/runs/{run_id}/metrics?max_points=10000"))["series"]
    assert series.keys() == values.keys()
    assert all(2 < len(points) <= 30 for points in series.values())
    assert all(point[2] is None for point in series["not_finite"])
    [alone] = (await api.get(f"/v1/runs/{run_id}/metrics?names=lr&max_points=10000"))[
        "series"
    ].values()
    assert 30 < len(alone) <= 120


async def test_attempts_and_failures_come_in_pages(api: ApiService) -> None:
    """Pages put together are the whole, whatever ends them, and no attempt is cut off its end."""
    run_id, journal = await api.running()
    whole = [{"rank": 0, "node_id": "n" * 300_000, "node_ip": "10.0.0.1", "pid": 7}]
    for attempt in range(2, 8):
        lost = journal.event(EventKind.FAILURE, verdict="worker_lost", first_rank=0, step=attempt)
        journal.attempt = attempt
        begun = journal.start(world_size=2)
        begun[0].data["workers"] = whole
        api.apply(run_id, [lost, *begun])
    path = f"/v1/runs/{run_id}"

    async def pages(query: str) -> list[list[dict[str, Any]]]:
        found, cursor = [], ""
        while True:
            page = await api.get(f"{path}/{query}{cursor}")
            found.append(page["items"])
            if page["next_cursor"] is None:
                return found
            cursor = f"&cursor={page['next_cursor']}"

    large = await pages("attempts?limit=200")
    every = [attempt for page in large for attempt in page]
    assert [(each["attempt"], each["last_step"]) for each in every] == [
        *((attempt, attempt + 1) for attempt in range(1, 7)),
        (7, None),
    ]
    assert [each["ended_at"] is None for each in every] == [False] * 6 + [True]
    assert len(large) > 1 and all(len(json.dumps(page)) < 2**20 for page in large)
    for limit in (1, 2, 7):
        paged = await pages(f"attempts?limit={limit}")
        assert [attempt for page in paged for attempt in page] == every
        assert max(map(len, paged)) <= limit
    without = [a for page in await pages("attempts?workers=false") for a in page]
    assert without == [{**attempt, "workers": []} for attempt in every]

    [all_failures] = await pages("failures?limit=200")
    assert [failure["step"] for failure in all_failures] == list(range(2, 8))
    assert await pages("failures?limit=4") == [all_failures[:4], all_failures[4:]]
    assert await pages("failures?limit=6") == [all_failures]
