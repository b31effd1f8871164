"""SQLite has one writer at a time; who reads does not wait for those who wait to write."""

from __future__ import annotations

import asyncio
import threading

from service.api.blocking import WRITERS
from tests.support.api_service import ApiService


async def test_readers_are_answered_while_a_crowd_waits_to_write(api: ApiService) -> None:
    run_id, _ = await api.running()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with api.database.write():
            held.set()
            done.wait(30)

    holder = asyncio.create_task(asyncio.to_thread(hold))
    await asyncio.to_thread(held.wait)
    body = {"notes": "from the crowd"}
    crowd = [
        asyncio.create_task(api.http.patch(f"/v1/runs/{run_id}", json=body)) for _ in range(20)
    ]
    try:
        async with asyncio.timeout(10):
            while not WRITERS.statistics().tasks_waiting:  # noqa: ASYNC110  no other sign of it
                await asyncio.sleep(0.01)
            assert (await api.get(f"/v1/runs/{run_id}"))["status"] == "RUNNING"
        assert not any(each.done() for each in crowd)
    finally:
        done.set()
        await holder
    assert {(await each).status_code for each in crowd} <= {200, 409}
