"""Drills as users of the SDK and the command line see them, against the service's real API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep import Client, RunHandle
from everstep.wire.drills import Drill
from everstep.wire.events import EventKind
from tests.support.api_service import ApiService, Journal
from tests.support.command_line import everstep
from tests.unit.service.annexes.drills.test_api_drills import recover, start


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path, drills=True) as service:
        service.announce(monkeypatch)
        yield service


async def running(api: ApiService) -> tuple[RunHandle, Journal]:
    run_id, journal = await api.running()
    api.apply(run_id, [journal.steps(*range(2, 12))])
    return await asyncio.to_thread(Client().runs.get, run_id), journal


async def asked(api: ApiService, run_id: str) -> Drill:
    """The drill that a client in another thread asks for."""
    async with asyncio.timeout(60):
        while not (items := (await api.get(f"/v1/runs/{run_id}/drills"))["items"]):  # noqa: ASYNC110  it comes from a thread
            await asyncio.sleep(0.01)
    return Drill.model_validate(items[0])


@pytest.mark.parametrize("as_json", [False, True])
async def test_the_command_waits_and_prints_the_report(api: ApiService, as_json: bool) -> None:
    run, journal = await running(api)
    telling = asyncio.create_task(
        everstep("drill", run.id, "kill_worker", "--rank", "1", *(["--json"] if as_json else []))
    )
    drill = await asked(api, run.id)
    start(api, journal, run.id, drill)
    recover(api, journal, run.id, 11, *range(12, 25))
    epoch = {
        "epoch": 1,
        "samples": 10,
        "used_once": 10,
        "duplicates": 0,
        "missing": 0,
        "digest": "ab" * 32,
        "seconds": 1.0,
    }
    api.apply(run.id, [journal.event(EventKind.EPOCH_COMPLETED, **epoch)])
    result = await telling
    assert result.exit_code == 0, result.output
    if as_json:
        found = json.loads(result.stdout)
        assert (found["id"], found["state"], found["report"]["parity"]["in_parity"]) == (
            drill.id,
            "recovered",
            True,
        )
        return
    for words in (
        "worker_lost",
        "detect 0.2 s",
        "first step 0.3 s",
        "2 -> 2",
        "process 101 on node node-2",
        "continues as before: mean 0.5",
    ):
        assert words in result.stdout, words
    watched = (await everstep("show", run.id)).stdout
    assert "RUNNING" in watched


async def test_the_command_need_not_wait_and_refuses_what_is_none(api: ApiService) -> None:
    run, _ = await running(api)
    begun = await everstep("drill", run.id, "hang_worker", "--no-wait")
    assert begun.exit_code == 0 and begun.stdout.startswith("drill_")
    assert (await everstep("drill", run.id, "kill_everything")).exit_code == 2
    assert (await everstep("drill", run.id, "kill_worker", "--rank", "7")).exit_code == 2


async def test_the_command_waits_for_a_run_that_is_about_to_train(api: ApiService) -> None:
    run_id = await api.create()
    api.runs.claim_submission(run_id, 0)
    refused = await everstep("drill", run_id, "kill_node", "--no-wait")
    assert refused.exit_code == 2 and "needs a run that is RUNNING" in refused.stderr
    late = await everstep("drill", run_id, "kill_node", "--timeout", "0.2")
    assert late.exit_code != 0 and "is still STARTING" in late.stderr
    assert f"run {run_id} is STARTING; waiting until its ranks train" in late.stderr
    telling = asyncio.create_task(everstep("drill", run_id, "kill_node"))
    api.runs.record_job(run_id, 1, f"{run_id}-s001")
    journal = Journal(at=api.clock.now)
    api.apply(run_id, [*journal.start(), journal.steps(1)])
    drill = await asked(api, run_id)
    failed = {"id": drill.id, "kind": "kill_node", "rank": 0, "problem": "no such luck"}
    api.apply(run_id, [journal.event(EventKind.DRILL_FAILED, **failed)])
    result = await telling
    assert result.exit_code == 1 and "no such luck" in result.stdout
