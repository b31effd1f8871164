"""The client for asyncio, against a real API: the same methods, awaited."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest

import everstep
from everstep import (
    AsyncClient,
    AsyncRun,
    InvalidSpec,
    NotFound,
    RunFailed,
)
from everstep.client import admin, async_client
from everstep.client.admin import Alerts, Nodes
from everstep.client.async_client import Mirror
from everstep.client.client import Client, Runs
from everstep.client.download import Code
from tests.support.api_service import ApiService, spec

MIRRORS = {
    Client: AsyncClient,
    everstep.RunHandle: AsyncRun,
    everstep.DrillHandle: async_client.AsyncDrill,
    everstep.ProfileHandle: async_client.AsyncProfile,
    Runs: async_client.AsyncRuns,
    Nodes: async_client.AsyncNodes,
    Code: async_client.AsyncCode,
    admin.Projects: async_client.AsyncProjects,
    admin.Tokens: async_client.AsyncTokens,
    admin.Sessions: async_client.AsyncSessions,
    Alerts: async_client.AsyncAlerts,
    admin.Audit: async_client.AsyncAudit,
    admin.ServiceStorage: async_client.AsyncStorage,
}


@pytest.fixture
async def client(api: ApiService) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(api.url, api.token("admin")) as client:
        yield client


def methods(kind: type[Any]) -> dict[str, Any]:
    return {
        name: found
        for name, found in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


@pytest.mark.parametrize("blocking", MIRRORS)
def test_every_method_is_there_with_its_arguments_and_documentation(blocking: type[Any]) -> None:
    """A method that is missing belongs into everstep/client/async_client.py, one line each."""
    ours, theirs = methods(MIRRORS[blocking]), methods(blocking)
    theirs = {"aclose" if name == "close" else name: found for name, found in theirs.items()}
    assert set(ours) == set(theirs)
    for name, found in theirs.items():
        if name == "aclose":
            continue
        assert inspect.signature(ours[name]) == inspect.signature(found)
        assert inspect.getdoc(ours[name]) == inspect.getdoc(found)
        is_list = inspect.isasyncgenfunction(ours[name])
        assert is_list == str(inspect.signature(found).return_annotation).startswith("Iterator")


async def test_every_part_of_the_client_has_its_mirror(client: AsyncClient) -> None:
    parts = {name for name in vars(client._blocking) if not name.startswith("_")}
    assert {name for name, part in vars(client).items() if isinstance(part, Mirror)} == parts


async def test_a_run_from_submission_to_its_end(api: ApiService, client: AsyncClient) -> None:
    run = await client.runs.create(spec())
    assert isinstance(run, AsyncRun) and run.status == "QUEUED" and "digits" in repr(run)
    assert "status" in dir(run) and run.latest_metrics == {}
    assert [each.id async for each in client.runs.list(status="QUEUED")] == [run.id]
    assert await run.cancel() is run and run.status == "CANCELLED"
    with pytest.raises(RunFailed, match="CANCELLED"):
        await run.wait(timeout_s=20)
    assert [event.kind async for event in run.events(follow=True)][-1] == "status"
    await run.delete()
    with pytest.raises(NotFound):
        await client.runs.get(run.id)
    with pytest.raises(InvalidSpec):
        await client.runs.create({"name": "x"})


async def test_calls_run_at_once_and_leave_the_loop_alone(client: AsyncClient) -> None:
    runs = [await client.runs.create(spec(name=f"n{n}")) for n in range(8)]
    waits = [asyncio.create_task(run.wait(timeout_s=60)) for run in runs]
    await asyncio.gather(*(run.cancel() for run in runs))
    ended = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(each) for each in ended] == [RunFailed] * 8


async def test_a_cancelled_task_ends_its_request_and_its_thread(
    api: ApiService, client: AsyncClient
) -> None:
    run = await client.runs.create(spec())
    first = asyncio.Event()

    async def follow() -> None:
        async with aclosing(run.events(follow=True)) as events:
            async for _ in events:
                first.set()

    following = asyncio.create_task(follow())
    waiting = asyncio.create_task(run.wait())
    async with asyncio.timeout(20):
        await first.wait()
        for task in (following, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    # A thread that still waited would hold up what comes next.
    assert (await client.runs.get(run.id)).id == run.id


async def test_breaking_out_of_a_stream_closes_it(client: AsyncClient) -> None:
    run = await client.runs.create(spec())
    async with aclosing(run.events(follow=True)) as events:
        async for event in events:
            assert event.kind == "run_created"
            break
    assert await client.health()


async def test_requests_are_repeated_with_pauses_in_the_loop() -> None:
    answers = [503, 503, 200]

    def answer(_request: httpx.Request) -> httpx.Response:
        assert threading.current_thread() is threading.main_thread()
        return httpx.Response(answers.pop(0), headers={"Retry-After": "0"})

    transport = httpx.MockTransport(answer)
    async with AsyncClient("http://127.0.0.1:9", "evs_x", transport=transport) as client:
        assert await client.health() and answers == []
