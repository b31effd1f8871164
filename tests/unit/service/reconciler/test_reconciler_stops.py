"""tick() ends runs: a cancel, a pause that outlives its driver, a deadline."""

from __future__ import annotations

import pytest

from everstep.wire import ReasonCode, RunStatus
from everstep.wire.events import EventKind
from service.reconciler.decide import DEADLINE_GRACE_S, STOP_GRACE_S
from storage.run_dir import RunDir
from tests.support.fake_ray import FakeRay
from tests.support.reconciler_world import METRICS, STARTED, SUCCEEDED, World

pytest_plugins = ["tests.support.reconciler_fixtures"]
pytestmark = pytest.mark.usefixtures("whole_ticks")


async def test_cancel_reaches_the_driver_and_then_ray(here: World, ray: FakeRay) -> None:
    run = here.create()
    await here.reconciler.tick()
    here.runs.request_stop(run.id, "cancel")
    await here.reconciler.tick()
    assert RunDir(here.storage, run.id).stop_requested(1) == "cancel"
    assert ray.stopped == []
    here.now += STOP_GRACE_S["cancel"] + 1
    for _ in range(2):
        await here.reconciler.tick()
    row = here.get(run.id)
    assert (row.status, row.reason_code) == (RunStatus.CANCELLED, ReasonCode.CANCELLED_BY_USER)
    assert ray.stopped == [f"{run.id}-s001"]


async def test_what_a_driver_of_the_past_was_asked_to_stop_for_does_not_stop_its_successor(
    here: World, ray: FakeRay
) -> None:
    """Ray lost sight of it, so that the run counted as paused before it had left; then it was
    resumed."""
    run = here.create()
    await here.reconciler.tick()
    here.write(run.id, 1, *STARTED, METRICS)
    await here.reconciler.tick()
    here.runs.request_stop(run.id, "pause")
    ray.end(f"{run.id}-s001")
    await here.reconciler.tick()
    assert here.get(run.id).status == RunStatus.PAUSED
    here.runs.resume(run.id)
    await here.reconciler.tick()
    assert here.get(run.id).submission == 2
    here.write(
        run.id, 1, (EventKind.FINISHED, {"outcome": "stopped", "reason": None, "step": 8}), first=5
    )
    await here.reconciler.tick()
    assert here.get(run.id).status == RunStatus.STARTING


async def test_a_deadline_is_the_driver_s_to_keep_and_the_service_s_when_it_does_not(
    here: World, ray: FakeRay
) -> None:
    run = here.create(recovery={"deadline_s": 60})
    await here.reconciler.tick()
    assert RunDir(here.storage, run.id).deadline() == pytest.approx(run.created_at + 60)
    here.now += 61
    await here.reconciler.tick()
    assert here.get(run.id).status == RunStatus.STARTING and ray.stopped == []
    here.now += DEADLINE_GRACE_S
    await here.reconciler.tick()
    row = here.get(run.id)
    assert (row.status, row.reason_code) == (RunStatus.FAILED, ReasonCode.DEADLINE_EXCEEDED)
    assert ray.stopped == [f"{run.id}-s001"]


async def test_a_run_that_finished_before_its_deadline_succeeds_however_late_that_is_read(
    here: World, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service was away when the run finished, and comes back after the deadline to a journal
    longer than one look."""
    monkeypatch.setattr("service.reconciler.tail.BATCH_EVENTS", 1)
    monkeypatch.setattr("service.reconciler.tail.MAX_BATCHES", 2)
    run = here.create(recovery={"deadline_s": 60})
    await here.reconciler.tick()
    here.write(run.id, 1, *STARTED, METRICS, SUCCEEDED)
    ray.end(f"{run.id}-s001", "SUCCEEDED")
    here.now += 61 + 2 * DEADLINE_GRACE_S
    for _ in range(4):
        await here.reconciler.tick()
    assert here.get(run.id).status == RunStatus.SUCCEEDED


async def test_a_run_whose_steps_are_done_may_take_its_time_to_end(
    here: World, ray: FakeRay
) -> None:
    run = here.create(recovery={"deadline_s": 60})
    await here.reconciler.tick()
    here.write(
        run.id,
        1,
        *STARTED,
        (EventKind.METRICS, {"points": [{"step": 10, "at": 1.0, "values": {"loss": 0.5}}]}),
    )
    here.now += 61 + 2 * DEADLINE_GRACE_S
    await here.reconciler.tick()
    assert here.get(run.id).status == RunStatus.RUNNING, "it commits its last checkpoint"
    here.write(run.id, 1, SUCCEEDED, first=5)
    await here.reconciler.tick()
    assert here.get(run.id).status == RunStatus.SUCCEEDED
