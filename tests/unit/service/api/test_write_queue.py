"""Submissions that come at the same moment: one commit for all of them on SQLite, and each with its
own answer and audit entry."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import httpx
import pytest
from sqlalchemy import Connection, text

from service.db.audit import current_entry
from tests.support.api_service import ApiService, spec
from tests.support.service_process import wait_for

T = TypeVar("T")


@contextmanager
def another_writer(api: ApiService) -> Iterator[None]:
    """Somebody else writes to the database for as long as the block lasts."""
    begun, done = threading.Event(), threading.Event()

    def write() -> None:
        with api.database.write():
            begun.set()
            assert done.wait(20)

    thread = threading.Thread(target=write)
    thread.start()
    assert begun.wait(20)
    try:
        yield
    finally:
        done.set()
        thread.join()


async def submitted_together(api: ApiService, *requests: tuple[str, str]) -> list[httpx.Response]:
    """Answers about runs of these (name, Idempotency-Key), all of which came while another writer
    had its turn."""
    come: list[object] = []
    do = api.context.calls._writes.do

    async def noted(call: Callable[[], T]) -> T:
        come.append(call)
        return await do(call)

    with another_writer(api), pytest.MonkeyPatch.context() as patched:
        patched.setattr(api.context.calls._writes, "do", noted)
        asked = [
            asyncio.create_task(
                api.http.post("/v1/runs", json=spec(name=name), headers={"Idempotency-Key": key})
            )
            for name, key in requests
        ]
        await asyncio.to_thread(
            wait_for, lambda: len(come) == len(requests), 20, "requests that wait"
        )
    return list(await asyncio.gather(*asked))


async def test_submissions_share_a_commit_and_each_has_its_own_answer(api: ApiService) -> None:
    answers = await submitted_together(
        api, ("a", "1"), ("b", "2"), ("b", "2"), ("other", "2"), ("c", "3")
    )
    # The order in which connections are served is not that of the tasks: of those with key 2 one is
    # first, one repeats or differs.
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses in ([200, 201, 201, 201, 409], [201, 201, 201, 409, 409])
    created = [answer.json() for answer in answers if answer.is_success]
    assert all([change["to"] for change in run["transitions"]] == ["QUEUED"] for run in created)
    assert {run["id"] for run in created} == {
        run["id"] for run in (await api.get("/v1/runs"))["items"]
    }
    audit = (await api.get("/v1/audit"))["items"]
    assert sorted(entry["status"] for entry in audit) == statuses
    assert {entry["target"] for entry in audit} - {None} == {run["id"] for run in created}


async def test_a_commit_that_fails_is_told_to_everybody_who_waits_for_it(api: ApiService) -> None:
    def orphan(connection: Connection) -> None:
        if current_entry() is None:
            return
        connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
        connection.execute(
            text("INSERT OR IGNORE INTO run_tags (run_id, key, value) VALUES ('nobody', 'k', 'v')")
        )

    api.database.companion = orphan
    answers = await submitted_together(api, ("a", "1"), ("b", "2"), ("c", "3"))
    assert {answer.status_code for answer in answers} == {500}
    assert (await api.get("/v1/runs"))["items"] == []
