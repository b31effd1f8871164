"""What ranks do now: from the command to the answer, against the service's real API; the ranks'
part is told by their journal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everstep.wire import Reason, ReasonCode, RunStatus
from everstep.wire.events import EventKind
from storage.run_control import StackOrder
from storage.run_dir import RunDir
from tests.support.api_service import ApiService, Journal
from tests.support.command_line import everstep

STACK = "Thread MainThread\n  here\nThread TrainingThread\n  File train.py, line 12, in save\n"
SUMMARY = "rank 0 waits in ray.train.report (train.py, line 12); rank 1 has returned"


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path) as service:
        service.announce(monkeypatch, "submitter")
        yield service


def found(id_: str | None, **facts: Any) -> dict[str, Any]:
    rank = {"rank": 0, "node_id": "node-1", "does": "waits in ray.train.report", "stack": STACK}
    known = {"quiet_s": 90.0, "step": 0, "summary": SUMMARY}
    return {"id": id_, **known, **facts, "ranks": [rank]}


async def test_the_command_asks_waits_and_shows_each_rank(api: ApiService) -> None:
    run_id, journal = await api.running()
    command = asyncio.create_task(everstep("stacks", run_id))
    async with asyncio.timeout(60):
        while (order := RunDir(api.storage, run_id).stacks_ordered(1)) is None:  # noqa: ASYNC110  it comes from a thread
            await asyncio.sleep(0.01)
    assert order == StackOrder(order.id, attempt=1)
    [asked] = (await api.get(f"/v1/runs/{run_id}/stacks"))["items"]
    assert (asked["id"], asked["complete"]) == (order.id, False)
    api.apply(run_id, [journal.event(EventKind.STACKS, **found(order.id))])
    done = await command
    assert done.exit_code == 0, done.output
    assert SUMMARY in " ".join(done.output.split())
    assert "File train.py, line 12, in save" in done.output and "here" not in done.output


async def test_why_says_what_a_run_that_stands_still_waits_for(api: ApiService) -> None:
    run_id, journal = await api.running()
    assert "no failures recorded" in (await everstep("why", run_id)).output
    api.apply(run_id, [journal.event(EventKind.STACKS, **found(None, step=1))])
    said = " ".join((await everstep("why", run_id)).output.split())
    assert SUMMARY in said and "no failures recorded" not in said
    moved = {"points": [{"step": 2, "at": 1.0, "values": {"loss": 1.0}}]}
    api.apply(run_id, [journal.event(EventKind.METRICS, **moved)])
    assert "no failures recorded" in (await everstep("why", run_id)).output


async def test_why_says_what_a_run_does_before_its_first_step(api: ApiService) -> None:
    async def said(run_id: str) -> str:
        text = " ".join((await everstep("why", run_id)).output.split())
        assert "no failures recorded" not in text
        return text

    run_id = await api.create()
    assert "waits for the service's next scheduling pass, for" in await said(run_id)
    wants = Reason(code=ReasonCode.WAITING_FOR_CAPACITY, message="waits for room for 3 workers")
    api.runs.set_reason(run_id, RunStatus.QUEUED, wants)
    text = await said(run_id)
    assert "waiting_for_capacity: waits for room for 3 workers" in text
    assert "free now: 2 CPU on node-1" in text
    api.runs.claim_submission(run_id, 0)
    api.runs.record_job(run_id, 1, f"{run_id}-s001")
    assert "its driver" in await said(run_id)
    journal = Journal(at=api.clock.now)
    [workers, restored, training] = journal.start()
    api.apply(run_id, [workers, restored])
    assert "2 ranks of attempt 1 start: they import the code" in await said(run_id)
    api.apply(run_id, [training])
    assert "its ranks make their first step, for" in await said(run_id)
    api.apply(run_id, [journal.steps(1)])
    assert "no failures recorded" in (await everstep("why", run_id)).output
