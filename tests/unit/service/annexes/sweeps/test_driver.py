"""Sweeps on a real database: runs as their journals tell, killed and repeated looks, two
replicas."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from everstep.spec.parsing import parse_spec
from everstep.spec.sweep import SweepSpec
from everstep.spec.trials import trials_of
from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from everstep.wire.sweep import SweepStatus
from service.annexes.sweeps.driver import SweepDriver
from service.annexes.sweeps.routes import best_of
from service.annexes.sweeps.store import SweepRow, SweepStore, TrialRow
from service.db.events import EventStore
from service.db.runs import RunStore
from service.model.run_rows import RunRow
from tests.support.api_service import Journal, ManualClock, spec
from tests.support.prepared_database import prepared_database


class World:
    """A database with sweeps, whose runs do what a test says."""

    def __init__(self, url: str) -> None:
        self.database = prepared_database(url)
        clock = ManualClock()
        self.runs = RunStore(self.database, clock)
        self.events = EventStore(self.database, clock)
        self.sweeps = SweepStore(self.database, clock)
        self.driver = SweepDriver(self.sweeps, self.runs)
        self.journals: dict[str, Journal] = {}

    def begin(self, **fields: Any) -> str:
        body = {"spec": spec(), "metric": "val_accuracy", "name": "s", "seed": 0} | fields
        sweep = SweepSpec.model_validate(body)
        return self.sweeps.create(sweep, trials_of(sweep), "tok_test")[0].id

    def sweep(self, sweep_id: str) -> SweepRow:
        found = self.sweeps.get(sweep_id)
        assert found is not None
        return found

    def trials(self, sweep_id: str) -> list[TrialRow]:
        return self.sweeps.trials([sweep_id])[sweep_id]

    def run(self, sweep_id: str, number: int) -> RunRow:
        run = self.runs.get(str(self.trials(sweep_id)[number].run_id))
        assert run is not None
        return run

    def train(self, sweep_id: str, number: int) -> None:
        """Let a queued run begin; it has 27 steps, and two rungs: at 3 and at 9."""
        run = self.run(sweep_id, number)
        self.runs.claim_submission(run.id, run.submission)
        self.runs.record_job(run.id, run.submission + 1, "job")
        journal = self.journals[run.id] = Journal(run.submission + 1, run.attempt + 1)
        begun = journal.start(step=run.step)[:2]
        journal.n = 2
        length = {"total_steps": 27, "steps_per_epoch": 3}
        self.apply(run.id, *begun, journal.event(EventKind.TRAINING_STARTED, **length))

    def evaluate(self, sweep_id: str, number: int, *points: tuple[int, float | None]) -> None:
        run = self.run(sweep_id, number)
        journal = self.journals[run.id]
        for step, value in points:
            self.apply(
                run.id,
                journal.steps(step),
                journal.event(EventKind.EVALUATED, step=step, epoch=0, metrics={"accuracy": value}),
            )

    def finish(self, sweep_id: str, number: int, outcome: str) -> None:
        run = self.run(sweep_id, number)
        reason = {"code": "user_error", "message": "x"} if outcome == "failed" else None
        self.apply(
            run.id,
            self.journals[run.id].event(
                EventKind.FINISHED, outcome=outcome, reason=reason, step=run.step
            ),
        )

    def apply(self, run_id: str, *events: Any) -> None:
        self.events.apply_journal(run_id, events[-1].submission, events, f"c{events[-1].n}")

    def statuses(self, sweep_id: str) -> list[RunStatus | None]:
        return [trial.status for trial in self.trials(sweep_id)]


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    made = World(database_url)
    yield made
    made.database.close()


def test_halving_pauses_the_worse_and_resumes_the_better_without_a_lost_step(world: World) -> None:
    asha = {"name": "asha", "reduction_factor": 3}
    sweep_id = world.begin(grid={"optimizer.lr": [0.1, 0.2, 0.3]}, scheduler=asha)
    world.driver.look()
    assert world.statuses(sweep_id) == [RunStatus.QUEUED] * 3
    for number, value in ((0, 0.5), (1, 0.9)):
        world.train(sweep_id, number)
        world.evaluate(sweep_id, number, (2, 0.2), (3, value), (4, 0.1))
    world.driver.look()
    assert world.statuses(sweep_id)[:2] == [RunStatus.STOPPING] * 2, "one in three goes on"
    for number in (0, 1):
        world.finish(sweep_id, number, "stopped")
    reason = world.run(sweep_id, 0).reason
    assert reason is not None and reason.code == "paused_by_sweep" and sweep_id in reason.message
    assert [trial.results for trial in world.trials(sweep_id)] == [[[3, 0.5]], [[3, 0.9]], []]

    world.train(sweep_id, 2)
    world.evaluate(sweep_id, 2, (3, 0.7))
    world.driver.look()
    assert world.statuses(sweep_id) == [RunStatus.PAUSED, RunStatus.QUEUED, RunStatus.STOPPING]
    world.finish(sweep_id, 2, "stopped")
    world.train(sweep_id, 1)
    world.evaluate(sweep_id, 1, (9, 0.95))
    world.driver.look()
    world.finish(sweep_id, 1, "stopped")
    world.driver.look()
    assert world.statuses(sweep_id)[1] == RunStatus.QUEUED, "the best trains to its end"
    world.train(sweep_id, 1)
    world.evaluate(sweep_id, 1, (27, 0.97))
    world.finish(sweep_id, 1, "succeeded")
    for _ in range(2):
        world.driver.look()
    assert world.statuses(sweep_id) == [
        RunStatus.CANCELLED,
        RunStatus.SUCCEEDED,
        RunStatus.CANCELLED,
    ]
    loser = world.run(sweep_id, 0).reason
    assert loser is not None and "other runs were better" in loser.message
    sweep = world.sweep(sweep_id)
    assert (sweep.state, sweep.reason_code) == (SweepStatus.SUCCEEDED, None)
    best = best_of(world.trials(sweep_id), True)
    assert best is not None and (best.number, best.value, best.step) == (1, 0.97, 27)
    assert world.run(sweep_id, 1).steps_lost == 0


def test_a_look_that_is_cut_off_anywhere_is_made_up_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies after each of its writes in turn; a new one goes on."""

    class Killed(BaseException):
        pass

    asha = {"name": "asha", "reduction_factor": 2}
    sweep_id = world.begin(grid={"optimizer.lr": [0.1, 0.2, 0.3, 0.4]}, scheduler=asha)
    write = world.database.write

    def look(left: int) -> None:
        """Look, with so many writes before the death."""

        def counted() -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return write()

        monkeypatch.setattr(world.database, "write", counted)
        try:
            SweepDriver(world.sweeps, world.runs).look()
        except Killed:
            pass
        finally:
            monkeypatch.setattr(world.database, "write", write)

    for _ in range(6):
        look(1)
    assert world.statuses(sweep_id) == [RunStatus.QUEUED] * 4
    for number in range(4):
        world.train(sweep_id, number)
        world.evaluate(sweep_id, number, (7, 0.1 * number))
    for _ in range(8):
        look(1)
    assert world.statuses(sweep_id)[:2] == [RunStatus.STOPPING] * 2
    assert [trial.rung for trial in world.trials(sweep_id)] == [0, 0, 1, 1]
    assert world.statuses(sweep_id)[2:] == [RunStatus.RUNNING] * 2
    numbers = [world.run(sweep_id, number).name for number in range(4)]
    assert numbers == [f"s-{number:03d}" for number in range(4)]
    assert sum(world.runs.count_by_status().values()) == 4, "none was submitted twice"


def test_two_replicas_submit_every_run_once(world: World) -> None:
    sweep_id = world.begin(grid={"train.seed": list(range(12))})
    drivers = [SweepDriver(world.sweeps, world.runs) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(driver.look) for driver in drivers]:
            done.result()
    assert sum(world.runs.count_by_status().values()) == 12
    runs = {trial.run_id for trial in world.trials(sweep_id)}
    assert len(runs) == 12 and None not in runs


def test_a_failed_run_is_named_and_the_others_go_on(world: World) -> None:
    sweep_id = world.begin(grid={"optimizer.lr": [0.1, 0.2]}, max_parallel=1)
    world.driver.look()
    assert world.statuses(sweep_id) == [RunStatus.QUEUED, None]
    world.train(sweep_id, 0)
    world.finish(sweep_id, 0, "failed")
    world.driver.look()
    assert world.statuses(sweep_id) == [RunStatus.FAILED, RunStatus.QUEUED]
    world.train(sweep_id, 1)
    world.evaluate(sweep_id, 1, (27, 0.4))
    world.finish(sweep_id, 1, "succeeded")
    world.driver.look()
    sweep = world.sweep(sweep_id)
    assert (sweep.state, sweep.reason_code) == (SweepStatus.SUCCEEDED, "runs_failed")
    assert str(sweep.reason_message).startswith(f"1 of 2 runs failed: {world.run(sweep_id, 0).id}")


def test_a_sweep_whose_origin_is_gone_holds_up_no_other(world: World) -> None:
    parent, _ = world.runs.create(parse_spec(spec()), "me")
    lost = world.begin(
        spec=spec(resume_from={"run_id": parent.id, "step": 3}), grid={"optimizer.lr": [0.1]}
    )
    with world.database.write() as connection:
        connection.exec_driver_sql("DELETE FROM runs")  # as an older version could
    other = world.begin(grid={"optimizer.lr": [0.1]})
    world.driver.look()
    assert world.sweep(lost).state == SweepStatus.FAILED
    assert world.statuses(other) == [RunStatus.QUEUED]


def test_a_metric_that_no_run_reports_is_said_with_those_that_there_are(world: World) -> None:
    sweep_id = world.begin(grid={"optimizer.lr": [0.1, 0.2]}, metric="val_acuracy")
    world.driver.look()
    for number in (0, 1):
        world.train(sweep_id, number)
        world.evaluate(sweep_id, number, (27, 0.4))
    world.finish(sweep_id, 0, "succeeded")
    world.driver.look()
    assert world.statuses(sweep_id)[1] == RunStatus.STOPPING
    world.finish(sweep_id, 1, "stopped")
    world.driver.look()
    sweep = world.sweep(sweep_id)
    assert (sweep.state, sweep.reason_code) == (SweepStatus.FAILED, "metric_missing")
    assert "loss, val_accuracy" in str(sweep.reason_message)
    assert "Did you mean val_accuracy?" in str(sweep.reason_message)


def test_a_run_that_a_user_paused_is_waited_for_by_name(world: World) -> None:
    sweep_id = world.begin(grid={"optimizer.lr": [0.1]})
    world.driver.look()
    run = world.run(sweep_id, 0)
    world.runs.request_stop(run.id, "pause")
    world.driver.look()
    sweep = world.sweep(sweep_id)
    assert (sweep.state, sweep.reason_code) == (SweepStatus.RUNNING, "waiting_for_paused_runs")
    assert run.id in str(sweep.reason_message)
    world.runs.resume(run.id)
    world.driver.look()
    assert world.sweep(sweep_id).reason_code is None


def test_values_that_are_not_finite_are_no_best(world: World) -> None:
    sweep_id = world.begin(grid={"optimizer.lr": [0.1]}, mode="min")
    world.driver.look()
    world.train(sweep_id, 0)
    world.evaluate(sweep_id, 0, (3, None))
    world.driver.look()
    assert world.trials(sweep_id)[0].best_value is None
    world.finish(sweep_id, 0, "succeeded")
    world.driver.look()
    sweep = world.sweep(sweep_id)
    assert (sweep.state, sweep.reason_code) == (SweepStatus.FAILED, "no_value")
