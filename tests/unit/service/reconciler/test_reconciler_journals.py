"""tick() reads what drivers write: the status of a run, and how it went on or ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from service.reconciler import tail as tail_module
from storage.errors import StorageUnavailable
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from tests.support.fake_ray import FakeRay
from tests.support.reconciler_world import METRICS, STARTED, SUCCEEDED, World, step_done, world

pytest_plugins = ["tests.support.reconciler_fixtures"]
pytestmark = pytest.mark.usefixtures("whole_ticks")


async def test_a_journal_becomes_status_metrics_and_end(here: World) -> None:
    run = here.create()
    await here.reconciler.tick()
    here.write(run.id, 1, *STARTED, METRICS)
    await here.reconciler.tick()
    row = here.get(run.id)
    assert (row.status, row.step, row.metrics, row.world_size) == (
        RunStatus.RUNNING,
        7,
        {"loss": 0.5},
        2,
    )
    here.write(run.id, 1, SUCCEEDED, first=5)
    await here.reconciler.tick()
    assert here.get(run.id).status == RunStatus.SUCCEEDED
    seqs = [event.seq for event in here.events.after(run.id, 0, 100)]
    assert seqs == list(range(1, len(seqs) + 1))


async def test_a_new_process_reads_on_where_the_last_one_stopped(
    here: World, tmp_path: Path, ray: FakeRay
) -> None:
    run = here.create()
    await here.reconciler.tick()
    here.write(run.id, 1, *STARTED)
    await here.reconciler.tick()
    before = len(here.events.after(run.id, 0, 100))
    here.write(run.id, 1, METRICS, SUCCEEDED, first=4)
    async with world(tmp_path, ray.url) as next_one:
        await next_one.reconciler.tick()
        assert next_one.get(run.id).status == RunStatus.SUCCEEDED
    assert len(here.events.after(run.id, 0, 100)) == before + 3, (
        "two entries of the journal, and the status"
    )


async def test_a_lost_driver_is_replaced_after_its_journal_was_read(
    here: World, ray: FakeRay
) -> None:
    run = here.create()
    await here.reconciler.tick()
    here.write(run.id, 1, *STARTED, METRICS)
    ray.end(f"{run.id}-s001")
    await here.reconciler.tick()
    row = here.get(run.id)
    assert (row.status, row.submission, row.step) == (RunStatus.RECOVERING, 2, 7)
    assert ray.jobs[f"{run.id}-s002"]["status"] == "RUNNING"
    here.write(run.id, 2, *STARTED)
    await here.reconciler.tick()
    here.write(run.id, 1, SUCCEEDED, first=5)
    await here.reconciler.tick()
    assert here.get(run.id).status == RunStatus.RUNNING, (
        "what a replaced driver still writes is not taken"
    )


async def test_ranks_that_leave_after_their_drivers_death_are_heard(
    here: World, ray: FakeRay
) -> None:
    run = here.create()
    await here.reconciler.tick()
    here.write(run.id, 1, *STARTED, METRICS)
    ray.end(f"{run.id}-s001")
    await here.reconciler.tick()
    here.write(run.id, 1, step_done(8), first=5)
    await here.reconciler.tick()
    row = here.get(run.id)
    assert (row.status, row.submission, row.step) == (RunStatus.RECOVERING, 2, 8), (
        "they train, but nobody drives them"
    )
    here.write(run.id, 1, step_done(9), first=6)
    restored = {
        "step": 9,
        "epoch": 0,
        "source": "checkpoint",
        "checkpoint": "step-000000009.s001.a001",
        "rejected": [],
    }
    here.write(
        run.id,
        2,
        (EventKind.SUBMISSION_STARTED, {}),
        STARTED[0],
        (EventKind.RESTORED, restored),
        STARTED[2],
    )
    await here.reconciler.tick()
    row = here.get(run.id)
    assert (row.status, row.step, row.steps_lost, row.journal_submission) == (
        RunStatus.RUNNING,
        9,
        0,
        2,
    )


async def test_a_newer_journal_that_cannot_be_read_is_not_taken_for_none(
    here: World, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may tell that the run has finished."""
    run = here.create()
    await here.reconciler.tick()
    here.write(run.id, 1, *STARTED, METRICS)
    ray.end(f"{run.id}-s001")
    await here.reconciler.tick()
    assert here.get(run.id).submission == 2
    here.write(run.id, 2, (EventKind.SUBMISSION_STARTED, {}), *STARTED, SUCCEEDED)
    ray.end(f"{run.id}-s002")
    here.now += 600

    def away(run_dir: RunDir, submission: int, *args: Any, **options: Any) -> Any:
        if submission == 2:
            raise StorageUnavailable("for a moment")
        return read_journal(run_dir, submission, *args, **options)

    with monkeypatch.context() as broken:
        broken.setattr(tail_module, "read_journal", away)
        await here.reconciler.tick()
        assert here.get(run.id).submission == 2, "it is not submitted again"
    await here.reconciler.tick()
    assert here.get(run.id).status == RunStatus.SUCCEEDED
