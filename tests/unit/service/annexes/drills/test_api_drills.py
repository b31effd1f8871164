"""Drills over HTTP: who may ask, what is refused, what reaches the driver, and what comes of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everstep.wire.drills import Drill, DrillKind, DrillState
from everstep.wire.events import EventKind
from storage.run_control import DrillOrder
from storage.run_dir import RunDir
from tests.support.api_service import ApiService, Journal
from tests.support.page_text import fail
from tests.support.problems import problem

KILL = {"kind": "kill_worker", "rank": 1}
PHASES = {"leave": 0.1, "decide": 0.2, "start": 0.3, "restore": 0.1, "first_step": 0.3}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path, drills=True) as service:
        yield service


async def ask(api: ApiService, run_id: str, body: object = KILL) -> Drill:
    answer = await api.http.post(f"/v1/runs/{run_id}/drills", json=body)
    assert answer.status_code == 202, answer.text
    return Drill.model_validate(answer.json())


async def listed(api: ApiService, run_id: str) -> list[Drill]:
    return [
        Drill.model_validate(item) for item in (await api.get(f"/v1/runs/{run_id}/drills"))["items"]
    ]


def start(api: ApiService, journal: Journal, run_id: str, drill: Drill, **data: Any) -> None:
    started = {
        "id": drill.id,
        "kind": drill.kind.value,
        "rank": drill.rank,
        "node_id": "node-2",
        "pid": 101,
        "checkpoint": None,
    }
    api.apply(run_id, [journal.event(EventKind.DRILL_STARTED, **started | data)])


def recover(
    api: ApiService,
    journal: Journal,
    run_id: str,
    step: int,
    *steps: int,
    world_size: int = 2,
    **restored: Any,
) -> None:
    """A failure, the next attempt, and its first steps, with a loss of 0.5."""
    events = [fail(journal, verdict="worker_lost", step=step, action="restart at once")]
    journal.attempt += 1
    journal.at += 2
    events += journal.start(step, world_size, **{"source": "snapshot", **restored})
    recovered = {
        "detect_s": 0.2,
        "recovery_s": 1.0,
        "steps_lost": 0,
        "world_size_before": 2,
        "world_size_after": world_size,
    }
    events += [
        journal.event(EventKind.RECOVERED, **recovered, phases=PHASES),
        journal.steps(*steps),
    ]
    api.apply(run_id, events)


async def test_a_drill_travels_to_the_driver_and_its_report_comes_back(api: ApiService) -> None:
    run_id, journal = await api.running()
    api.apply(run_id, [journal.steps(*range(2, 16))])
    drill = await ask(api, run_id)
    assert (drill.kind, drill.rank, drill.state, drill.report) == (
        DrillKind.KILL_WORKER,
        1,
        DrillState.REQUESTED,
        None,
    )
    order = RunDir(api.storage, run_id).drill_ordered(1)
    assert order == DrillOrder(drill.id, DrillKind.KILL_WORKER, 1, attempt=1)
    start(api, journal, run_id, drill)
    [begun] = await listed(api, run_id)
    assert begun.state is DrillState.STARTED and begun.report is not None and not begun.complete
    assert (begun.report.node_id, begun.report.pid, begun.report.verdict) == ("node-2", 101, None)
    recover(api, journal, run_id, 15, 16)
    [recovering] = await listed(api, run_id)
    assert recovering.report is not None and recovering.report.parity is not None
    assert recovering.report.parity.in_parity is None and not recovering.complete, (
        "one step tells nothing yet"
    )
    api.apply(run_id, [journal.steps(*range(17, 30))])
    [done] = await listed(api, run_id)
    report = done.report
    assert (
        done.state is DrillState.RECOVERED
        and done.complete
        and report is not None
        and report.parity is not None
    )
    assert (report.verdict, report.steps_lost, report.recovery_s, report.total_s) == (
        "worker_lost",
        0,
        1.0,
        2.0,
    )
    assert list(report.phases) == ["detect", "leave", "decide", "start", "restore", "first_step"]
    assert (report.world_size_before, report.world_size_after, report.restored_from) == (
        2,
        2,
        "snapshot",
    )
    assert (
        report.parity.in_parity is True
        and report.parity.num_steps_after == 10
        and report.note is None
    )
    assert Drill.model_validate(await api.get(f"/v1/runs/{run_id}/drills/{drill.id}")) == done
    problem(await api.http.get(f"/v1/runs/{run_id}/drills/drill_000000000000"), 404, "not_found")


async def test_drills_are_off_unless_the_operator_says_so(tmp_path: Path) -> None:
    async with ApiService(tmp_path) as api:
        run_id, _ = await api.running()
        found = problem(
            await api.http.post(f"/v1/runs/{run_id}/drills", json=KILL), 403, "drills_disabled"
        )
        assert "--drills" in found.detail and "EVERSTEP_DRILLS=1" in found.detail
        assert await listed(api, run_id) == []
        assert RunDir(api.storage, run_id).drill_ordered(1) is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"kind": "kill_worker", "rank": 2}, "rank"),
        ({"kind": "kill_worker", "rank": -1}, "rank"),
        ({"kind": "kill_worker", "rank": "x"}, "rank"),
        ({"kind": "kill_everything"}, "kind"),
        ({"rank": 1}, "kind"),
        ({"kind": "kill_worker", "ranks": 1}, "ranks"),
    ],
)
async def test_a_wrong_request_is_named_by_its_field(
    api: ApiService, body: Any, field: str
) -> None:
    run_id, _ = await api.running()
    found = problem(
        await api.http.post(f"/v1/runs/{run_id}/drills", json=body), 422, "invalid_request"
    )
    assert [error.loc for error in found.errors] == [(field,)]
    assert await listed(api, run_id) == []


async def test_a_drill_needs_a_run_that_trains(api: ApiService) -> None:
    queued = await api.create()
    running, _ = await api.running()
    await api.http.post(f"/v1/runs/{running}/cancel")
    for run_id in (queued, running):
        found = problem(
            await api.http.post(f"/v1/runs/{run_id}/drills", json=KILL), 409, "invalid_transition"
        )
        assert "RUNNING" in found.detail
    problem(await api.http.post("/v1/runs/run_000000000000/drills", json=KILL), 404, "not_found")


async def test_one_drill_at_a_time(api: ApiService) -> None:
    run_id, journal = await api.running()
    first = await ask(api, run_id)
    found = problem(
        await api.http.post(f"/v1/runs/{run_id}/drills", json=KILL), 409, "invalid_transition"
    )
    assert first.id in found.detail
    refused = {"id": first.id, "kind": "kill_worker", "rank": 1, "problem": "attempt 1 has ended"}
    api.apply(run_id, [journal.event(EventKind.DRILL_FAILED, **refused)])
    second = await ask(api, run_id)
    api.clock.now += 16
    third = await ask(api, run_id)
    assert [(each.id, each.state) for each in await listed(api, run_id)] == [
        (first.id, DrillState.FAILED),
        (second.id, DrillState.LAPSED),
        (third.id, DrillState.REQUESTED),
    ]
    assert (await listed(api, run_id))[0].problem == "attempt 1 has ended"


async def test_a_drill_that_the_run_does_not_survive_says_so(api: ApiService) -> None:
    run_id, journal = await api.running()
    begun = await ask(api, run_id)
    start(api, journal, run_id, begun)
    reason = {"code": "no_progress", "message": "too often"}
    api.apply(run_id, [journal.event(EventKind.FINISHED, outcome="failed", reason=reason, step=1)])
    [found] = await listed(api, run_id)
    assert found.state is DrillState.UNRECOVERED and found.complete


async def test_a_killed_driver_s_drill_is_followed_into_the_next_submission(
    api: ApiService,
) -> None:
    run_id, journal = await api.running()
    api.apply(run_id, [journal.steps(*range(2, 12))])
    drill = await ask(api, run_id, {"kind": "kill_driver"})
    start(api, journal, run_id, drill, node_id=None)
    api.runs.claim_submission(run_id, 1)
    later = Journal(submission=2, attempt=1, at=journal.at)
    api.apply(
        run_id,
        [
            later.event(
                EventKind.SUBMISSION_STARTED,
                ray_job_id="x",
                driver_pid=1,
                driver_node_id="n",
                versions={},
            )
        ],
    )
    recover(
        api,
        later,
        run_id,
        10,
        *range(11, 21),
        source="checkpoint",
        checkpoint="step-000000010.s001.a001",
    )
    [found] = await listed(api, run_id)
    assert (
        found.state is DrillState.RECOVERED
        and found.report is not None
        and found.report.parity is not None
    )
    assert (
        found.report.restored_from == "step-000000010.s001.a001"
        and found.report.parity.in_parity is True
    )


async def test_a_damaged_checkpoint_that_was_not_needed_is_told_from_one_that_was(
    api: ApiService,
) -> None:
    run_id, journal = await api.running()
    api.apply(run_id, [journal.steps(*range(2, 12))])
    newest = "step-000000010.s001.a001"
    for rejected in ([], [{"name": newest, "problem": "model.pt differs"}]):
        drill = await ask(api, run_id, {"kind": "corrupt_checkpoint"})
        start(api, journal, run_id, drill, node_id=None, pid=None, checkpoint=newest)
        recover(
            api,
            journal,
            run_id,
            5,
            *range(6, 16),
            source="checkpoint",
            checkpoint="step-000000005.s001.a001",
            rejected=rejected,
        )
    unneeded, needed = [each.report for each in await listed(api, run_id)]
    assert unneeded is not None and unneeded.note is not None and "was not needed" in unneeded.note
    assert needed is not None and needed.note is not None and "skipped" in needed.note
    assert (
        needed.rejected == (newest,)
        and needed.parity is not None
        and needed.parity.in_parity is True
    )
