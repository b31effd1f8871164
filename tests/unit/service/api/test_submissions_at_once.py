"""Submissions that come while another writer holds SQLite: each has its own answer and audit
entry."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.api_service import ApiService, spec

HELD_OPEN_S = 0.3


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


async def test_each_submission_has_its_own_answer_and_audit_entry(api: ApiService) -> None:
    wanted = [("a", "1"), ("b", "2"), ("b", "2"), ("other", "2"), ("c", "3")]
    with another_writer(api):
        asked = [
            asyncio.create_task(
                api.http.post("/v1/runs", json=spec(name=name), headers={"Idempotency-Key": key})
            )
            for name, key in wanted
        ]
        done, _ = await asyncio.wait(asked, timeout=HELD_OPEN_S)
        assert not done
    answers = await asyncio.gather(*asked)
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
