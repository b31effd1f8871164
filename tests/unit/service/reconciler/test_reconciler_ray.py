"""tick() with a Ray that hangs, is away, forgets, or answers about a dead node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from everstep.wire import ReasonCode, RunStatus
from service.db.tables import runs
from tests.support.fake_ray import HANGS_S, FakeRay
from tests.support.reconciler_world import METRICS, STARTED, World

if TYPE_CHECKING:
    # a plugin must not be imported before it is one
    from tests.support.reconciler_fixtures import SetPatience

pytest_plugins = ["tests.support.reconciler_fixtures"]
pytestmark = pytest.mark.usefixtures("whole_ticks")


async def test_a_cluster_that_forgot_everything_gets_the_next_submission(
    here: World, ray: FakeRay
) -> None:
    run = here.create()
    await here.reconciler.tick()
    ray.jobs.clear()
    await here.reconciler.tick()
    assert list(ray.jobs) == [f"{run.id}-s002"]


async def test_a_job_on_a_dead_node_has_ended_whatever_ray_calls_it(
    here: World, ray: FakeRay
) -> None:
    """So Ray 2.60 answers after its head was restarted with its state: the job's supervisor is
    gone, and nobody looks."""
    run = here.create()
    await here.reconciler.tick()
    ray.jobs[f"{run.id}-s001"]["driver_node_id"] = "n2"
    for state in ("ALIVE", "DEAD"):
        ray.nodes = [*ray.nodes[:2], ray.node("n2", {}, state=state)]
        for _ in range(2):
            await here.reconciler.tick()
        assert list(ray.jobs) == [f"{run.id}-s001", f"{run.id}-s002"][: 1 + (state == "DEAD")]
    assert ray.stopped == [], "Ray has nobody who could stop it"


async def test_a_ray_that_hangs_keeps_no_journal_from_being_read(
    here: World, ray: FakeRay, patience: SetPatience
) -> None:
    ray.nodes.append(ray.node("n2", {"CPU": 2.0}))
    run = here.create()
    await here.reconciler.tick()
    ray.answers.clear()
    patience(0.5)
    try:
        here.write(run.id, 1, *STARTED, METRICS)
        began = time.monotonic()
        await here.reconciler.tick()
        assert here.get(run.id).step == 7
        waiting = here.create()
        await here.reconciler.tick()
        assert here.get(waiting.id).status == RunStatus.QUEUED
        assert time.monotonic() - began < HANGS_S / 2
    finally:
        ray.answers.set()
        patience(60.0)
    for _ in range(5):
        await here.reconciler.tick()
    assert here.get(waiting.id).status == RunStatus.STARTING
    await here.reconciler.close()


async def test_no_such_job_from_before_the_job_means_nothing_afterwards(
    here: World, ray: FakeRay, patience: SetPatience
) -> None:
    """Ray is asked about a claimed submission, and is slow to say that there is no job; meanwhile
    it is submitted."""
    run = here.create()
    await here.reconciler.tick()
    job = ray.jobs.pop(f"{run.id}-s001")
    with here.database.write() as connection:
        connection.execute(runs.update().values(ray_job_id=None, submitted_at=None))
    ray.answers.clear()
    patience(0.5)
    await here.reconciler.tick()
    # The answer is on its way; the submission is made meanwhile, as a slow action in the background
    # would.
    ray.jobs[f"{run.id}-s001"] = job
    here.runs.record_job(run.id, 1, f"{run.id}-s001")
    ray.answers.set()
    patience(60.0)
    for _ in range(4):
        await here.reconciler.tick()
    assert here.get(run.id).submission == 1
    assert list(ray.jobs) == [f"{run.id}-s001"]


async def test_ray_away_is_said_and_gets_over(here: World, ray: FakeRay) -> None:
    ray.broken = True
    run = here.create()
    await here.reconciler.tick()
    row = here.get(run.id)
    assert (row.status, row.reason_code) == (RunStatus.QUEUED, ReasonCode.WAITING_FOR_CLUSTER)
    ray.broken = False
    await here.reconciler.tick()
    row = here.get(run.id)
    assert (row.status, row.reason_code) == (RunStatus.STARTING, None)


async def test_only_our_own_superseded_jobs_are_ended(
    here: World, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = here.create()
    await here.reconciler.tick()
    ray.end(f"{run.id}-s001")
    await here.reconciler.tick()
    # Ray lost sight of the first driver, which lives; and another service shares the cluster.
    ray.jobs[f"{run.id}-s001"]["status"] = "RUNNING"
    other = {"run_id": "run_of_another", "submission": "1"}
    ray.jobs["run_of_another-s001"] = {
        **ray.jobs[f"{run.id}-s001"],
        "submission_id": "run_of_another-s001",
        "metadata": other,
    }
    await here.reconciler.tick()
    assert ray.stopped == [], "it may be ending by itself"
    monkeypatch.setattr("service.reconciler.decide.STRAY_GRACE_S", 0.0)
    await here.reconciler.tick()
    assert ray.stopped == [f"{run.id}-s001"]
