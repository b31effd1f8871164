"""tick() on a real database and real storage, with a dashboard that does what the test says."""

from __future__ import annotations

import asyncio
import gc
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from everstep.wire import ReasonCode, RunStatus
from everstep.wire.events import EventKind
from service.db.errors import DatabaseUnavailable
from service.db.tables import runs
from service.reconciler import execute
from service.reconciler import tail as tail_module
from service.reconciler.decide import DEADLINE_GRACE_S, STOP_GRACE_S
from storage.cluster.identity import Known, read_identity
from storage.errors import StorageUnavailable
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from tests.support.fake_ray import HANGS_S, FakeRay
from tests.support.reconciler_world import World, world

if TYPE_CHECKING:
    # a plugin must not be imported before it is one
    from tests.support.reconciler_fixtures import SetPatience

pytest_plugins = ["tests.support.reconciler_fixtures"]
pytestmark = pytest.mark.usefixtures("whole_ticks")

STARTED = (
    (EventKind.ATTEMPT_STARTED, {"world_size": 2, "workers": []}),
    (
        EventKind.RESTORED,
        {"step": 0, "epoch": 0, "source": "fresh", "checkpoint": None, "rejected": []},
    ),
    (EventKind.TRAINING_STARTED, {"total_steps": 10, "steps_per_epoch": 10}),
)


def step_done(step: int) -> tuple[EventKind, dict[str, Any]]:
    return EventKind.METRICS, {"points": [{"step": step, "at": 1.0, "values": {"loss": 0.5}}]}


METRICS = step_done(7)
SUCCEEDED = (EventKind.FINISHED, {"outcome": "succeeded", "reason": None, "step": 10})


async def test_a_queued_run_becomes_one_job(here: World, ray: FakeRay) -> None:
    run = here.create()
    for _ in range(3):
        await here.reconciler.tick()
    job_id = f"{run.id}-s001"
    assert ray.submissions == [job_id]
    job = ray.jobs[job_id]
    known = Known(storage=read_identity(here.storage)).to_text()
    command = (
        f"python -m train_fn.driver --storage {here.storage.uri} --run-id {run.id} --submission 1"
    )
    assert job["entrypoint"] == f"EVERSTEP_KNOWN={shlex.quote(known)} {command}"
    page = f"https://everstep.example/runs/{run.id}"
    assert job["metadata"] == {
        "run_id": run.id,
        "run_name": "a",
        "project": "default",
        "submission": "1",
        "everstep": page,
    }
    assert not {"runtime_env", "entrypoint_num_cpus", "entrypoint_resources"} & job.keys()
    assert RunDir(here.storage, run.id).read_spec().name == "a"
    row = here.get(run.id)
    assert (row.status, row.submission, row.ray_job_id) == (RunStatus.STARTING, 1, job_id)


@pytest.mark.parametrize("point", ["before_claim", "after_claim", "after_submit", "after_record"])
async def test_a_kill_at_any_line_of_a_start_leaves_one_job(
    point: str, tmp_path: Path, ray: FakeRay, here: World
) -> None:
    run = here.create()
    command = [sys.executable, "-m", "tests.support.reconciler_world", str(tmp_path), ray.url]
    killed = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "EVERSTEP_CRASH_POINT": point}
    )
    assert await asyncio.wait_for(killed.wait(), 60) == -signal.SIGKILL
    for _ in range(3):
        await here.reconciler.tick()
    assert list(ray.jobs) == [f"{run.id}-s001"]
    row = here.get(run.id)
    assert (row.status, row.submission, row.ray_job_id) == (RunStatus.STARTING, 1, f"{run.id}-s001")


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


async def test_a_journal_that_has_not_grown_is_not_read_again(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def counted(run_dir: RunDir, *more: Any, **options: Any) -> Any:
        reads.append(run_dir.run_id)
        return read_journal(run_dir, *more, **options)

    monkeypatch.setattr("service.reconciler.tail.read_journal", counted)
    run = here.create()
    await here.reconciler.tick()
    here.write(run.id, 1, (EventKind.ATTEMPT_STARTED, {"world_size": 2, "workers": []}))
    for _ in range(2):
        await here.reconciler.tick()
    assert here.get(run.id).world_size == 2
    reads.clear()
    await here.reconciler.tick()
    assert reads == []
    here.write(run.id, 1, (EventKind.ATTEMPT_ENDED, {"cause": "resized", "last_step": 0}), first=2)
    await here.reconciler.tick()
    assert reads == [run.id] and here.get(run.id).world_size is None


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
        "checkpoint": "step-000000009.s001",
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

    def away(run_dir: RunDir, submission: int, cursor: str | None = None, limit: int = 1000) -> Any:
        if submission == 2:
            raise StorageUnavailable("for a moment")
        return read_journal(run_dir, submission, cursor, limit)

    with monkeypatch.context() as broken:
        broken.setattr(tail_module, "read_journal", away)
        await here.reconciler.tick()
        assert here.get(run.id).submission == 2, "it is not submitted again"
    await here.reconciler.tick()
    assert here.get(run.id).status == RunStatus.SUCCEEDED


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


async def test_a_job_that_ray_calls_failed_may_have_succeeded(here: World, ray: FakeRay) -> None:
    run = here.create()
    await here.reconciler.tick()
    here.write(run.id, 1, *STARTED, SUCCEEDED)
    ray.end(f"{run.id}-s001")
    await here.reconciler.tick()
    assert here.get(run.id).status == RunStatus.SUCCEEDED
    assert ray.submissions == [f"{run.id}-s001"]


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


async def test_ray_away_is_said_and_gets_over(here: World, ray: FakeRay) -> None:
    ray.broken = True
    run = here.create()
    await here.reconciler.tick()
    row = here.get(run.id)
    assert (row.status, row.reason_code) == (RunStatus.QUEUED, ReasonCode.WAITING_FOR_CLUSTER)
    assert here.reconciler.ray_problem is not None
    ray.broken = False
    await here.reconciler.tick()
    row = here.get(run.id)
    assert (row.status, row.reason_code) == (RunStatus.STARTING, None)
    assert here.reconciler.ray_problem is None


async def test_what_can_never_fit_says_so_and_starts_when_it_can(here: World, ray: FakeRay) -> None:
    run = here.create(scaling={"min_workers": 3, "max_workers": 3})
    await here.reconciler.tick()
    row = here.get(run.id)
    assert (row.status, row.reason_code) == (RunStatus.QUEUED, ReasonCode.INFEASIBLE)
    assert "1 CPU more" in (row.reason_message or "")
    ray.nodes.append(ray.node("n2", {"CPU": 1.0}))
    await here.reconciler.tick()
    assert list(ray.jobs) == [f"{run.id}-s001"]


async def test_storage_that_cannot_be_written_keeps_the_run_queued(
    here: World, ray: FakeRay, tmp_path: Path
) -> None:
    (tmp_path / "storage").write_text("a file where the directory should be")
    run = here.create()
    await here.reconciler.tick()
    row = here.get(run.id)
    assert (row.status, row.submission, row.reason_code) == (
        RunStatus.QUEUED,
        0,
        ReasonCode.STORAGE_UNAVAILABLE,
    )
    assert ray.submissions == []


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


async def test_of_many_runs_that_fail_at_once_each_failure_is_taken(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody takes is told by the event loop, with its traceback: of hundreds that held a
    service up for minutes."""
    for _ in range(3):
        here.create()
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: unhandled.append(context)
    )

    async def fail(*_: object) -> None:
        raise DatabaseUnavailable("away")

    monkeypatch.setattr(execute.Executor, "_execute_for", fail)
    with pytest.raises(DatabaseUnavailable):
        await here.reconciler.tick()
    gc.collect()
    await asyncio.sleep(0)
    assert unhandled == []
