"""What each event changes in a run's row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everstep.wire import ReasonCode, RunStatus
from everstep.wire.events import EventKind
from service.model.rows import EventRow, MetricPoint
from service.projections.handlers import project
from tests.support.api_service import NOON
from tests.support.projected_events import WORKERS, committed, event, run_row


def test_an_attempt_counts_and_clears_what_the_run_waited_for() -> None:
    waiting = run_row(RunStatus.STARTING, reason_code="waiting_for_capacity", reason_message="x")
    first = project(
        waiting, event(EventKind.ATTEMPT_STARTED, world_size=1, workers=WORKERS)
    ).columns
    assert first == {
        "attempt": 1,
        "restarts": 0,
        "world_size": 1,
        "workers": WORKERS,
        "snapshots": None,
        "reason_code": None,
        "reason_message": None,
    }
    later = project(
        run_row(attempt=1),
        event(EventKind.ATTEMPT_STARTED, attempt=4, world_size=1, workers=WORKERS),
    ).columns
    assert (later["attempt"], later["restarts"]) == (4, 1)
    resumed = project(
        run_row(RunStatus.STARTING, attempt=1, restarts=2),
        event(EventKind.ATTEMPT_STARTED, attempt=2, world_size=1, workers=WORKERS),
    ).columns
    assert (resumed["attempt"], resumed["restarts"]) == (2, 2), "its owner had paused it"


def test_training_makes_a_run_running_where_that_is_legal() -> None:
    started = event(
        EventKind.TRAINING_STARTED, total_steps=30, steps_per_epoch=10, snapshots="published"
    )
    for before, after in (
        (RunStatus.STARTING, RunStatus.RUNNING),
        (RunStatus.RECOVERING, RunStatus.RUNNING),
        (RunStatus.RUNNING, None),
        (RunStatus.STOPPING, None),
        (RunStatus.QUEUED, None),
    ):
        changes = project(run_row(before), started)
        assert changes.status == after
        assert changes.columns == {
            "total_steps": 30,
            "steps_per_epoch": 10,
            "snapshots": "published",
        }


def test_metrics_move_the_run() -> None:
    points = [
        {"step": 10, "at": NOON + 1, "values": {"loss": 2.0, "lr": 0.1}},
        {"step": 11, "at": NOON + 2, "values": {"loss": None}},
    ]
    changes = project(
        run_row(RunStatus.STARTING, steps_per_epoch=10, metrics={"val_loss": 1.0}),
        event(EventKind.METRICS, points=points),
    )
    assert changes.columns == {
        "metrics": {"val_loss": 1.0, "lr": 0.1},
        "step": 11,
        "epoch": 1,
        "started_at": NOON + 1,
    }
    assert changes.status == RunStatus.RUNNING
    assert changes.points == (
        MetricPoint("loss", 10, NOON + 1, 2.0),
        MetricPoint("lr", 10, NOON + 1, 0.1),
        MetricPoint("loss", 11, NOON + 2, None),
    )
    assert (
        "started_at"
        not in project(run_row(started_at=NOON), event(EventKind.METRICS, points=points)).columns
    )
    assert project(run_row(), event(EventKind.METRICS, points=[])).columns == {}


def test_epochs_done_are_counted_as_checkpoints_count_them() -> None:
    """A checkpoint of the last step is of epoch 3 of 3."""
    known = replace(run_row(), total_steps=30, steps_per_epoch=10)
    for step, epoch in ((29, 2), (30, 3)):
        points = [{"step": step, "at": NOON, "values": {"loss": 1.0}}]
        assert project(known, event(EventKind.METRICS, points=points)).columns["epoch"] == epoch
    assert project(known, event(EventKind.EPOCH_COMPLETED, epoch=2)).columns == {"epoch": 3}


@pytest.mark.parametrize("name", ["accuracy", "val_accuracy"])
def test_evaluations_are_series_of_their_own_and_the_best_is_kept(name: str) -> None:
    better = project(
        run_row(best={"metric": "accuracy", "value": 0.8, "step": 10}),
        event(EventKind.EVALUATED, step=20, metrics={name: 0.9}),
    )
    assert better.columns == {
        "metrics": {"val_accuracy": 0.9},
        "best": {"metric": "accuracy", "value": 0.9, "step": 20},
    }
    assert better.points == (MetricPoint("val_accuracy", 20, NOON, 0.9),)
    equal = project(
        run_row(best={"metric": "accuracy", "value": 0.9, "step": 10}),
        event(EventKind.EVALUATED, step=20, metrics={name: 0.9}),
    )
    assert "best" not in equal.columns, "of two equals the first"
    assert (
        "best"
        not in project(run_row(), event(EventKind.EVALUATED, step=20, metrics={name: None})).columns
    )


def test_going_back_counts_lost_steps_until_the_driver_knows_better() -> None:
    back = project(
        run_row(step=15, steps_lost=3), event(EventKind.RESTORED, step=10, epoch=1)
    ).columns
    assert (back["step"], back["epoch"], back["steps_lost"], back["steps_lost_at_restore"]) == (
        10,
        1,
        8,
        5,
    )
    reported = project(
        run_row(steps_lost=8, steps_lost_at_restore=5), event(EventKind.RECOVERED, steps_lost=7)
    ).columns
    assert reported == {"steps_lost_at_restore": 0, "steps_lost": 10}
    silent = project(
        run_row(steps_lost=8, steps_lost_at_restore=5), event(EventKind.RECOVERED)
    ).columns
    assert silent == {"steps_lost_at_restore": 0}
    assert "redone_s" not in back and "redone_s" not in reported
    ahead = project(run_row(step=9), event(EventKind.RESTORED, step=10, epoch=1)).columns
    assert ahead["steps_lost"] == 0, "a survivor may know of steps that were never reported"


def test_work_between_the_reports_of_a_function_adds_up() -> None:
    began = event(EventKind.RESTORED, step=0, epoch=0, source="fresh", unit="reports")
    assert project(run_row(), began).columns["redone_s"] == 0.0
    again = event(EventKind.RECOVERED, steps_lost=0, unit="reports", since_report_s=12.5)
    assert project(run_row(redone_s=4.0), again).columns["redone_s"] == 16.5
    unknown = event(EventKind.RECOVERED, steps_lost=0, unit="reports", since_report_s=None)
    assert project(run_row(redone_s=4.0), unknown).columns["redone_s"] == 4.0
    back = event(EventKind.RESTORED, step=3, epoch=0, source="checkpoint", unit="reports")
    assert "redone_s" not in project(run_row(redone_s=4.0), back).columns
    own = event(EventKind.RESTORED, step=3, epoch=0, source="own_files")
    assert "redone_s" not in project(run_row(redone_s=4.0), own).columns
    protected = event(EventKind.RESTORED, step=3, epoch=0, source="snapshot")
    assert project(run_row(redone_s=4.0), protected).columns["redone_s"] is None


def test_the_latest_checkpoint_is_of_the_lineage() -> None:
    run = run_row()
    for row in (committed(10), committed(20), committed(30)):
        run = replace(run, **project(run, row).columns)
    assert run.latest_checkpoint is not None and run.latest_checkpoint["step"] == 30
    deleted = project(
        run, event(EventKind.CHECKPOINT_DELETED, step=30, name="step-000000030.s001.a001")
    ).columns
    assert deleted["latest_checkpoint"]["step"] == 20
    back = project(
        run, event(EventKind.RESTORED, submission=2, step=20, epoch=0, source="checkpoint")
    ).columns
    assert back["latest_checkpoint"]["step"] == 20, (
        "step 30 is of an older submission and beyond the restore"
    )
    rejected = [{"name": "step-000000030.s001.a001", "problem": "size"}]
    same = project(
        run, event(EventKind.RESTORED, step=20, epoch=0, source="checkpoint", rejected=rejected)
    ).columns
    assert same["latest_checkpoint"]["step"] == 20
    fresh = project(
        run, event(EventKind.RESTORED, submission=2, step=0, epoch=0, source="fresh")
    ).columns
    assert fresh["latest_checkpoint"] is None


def test_an_evaluation_beyond_a_restore_is_no_longer_the_best() -> None:
    def evaluated(step: int, value: float) -> EventRow:
        return event(EventKind.EVALUATED, step=step, epoch=0, metrics={"accuracy": value})

    def restored(step: int, source: str = "snapshot", **data: Any) -> EventRow:
        return event(EventKind.RESTORED, step=step, epoch=0, source=source, **data)

    def best_after(*history: EventRow) -> dict[str, Any] | None:
        run = run_row()
        for row in history:
            run = replace(run, **project(run, row).columns)
        return run.best

    before = (evaluated(40, 0.7), evaluated(80, 0.9))
    in_state = {"metric": "val_accuracy", "value": 0.7, "step": 40}
    best_of_40 = {"metric": "accuracy", "value": 0.7, "step": 40}
    assert best_after(*before, restored(50, best=in_state)) == best_of_40
    again = best_after(*before, restored(50, best=in_state), evaluated(80, 0.8))
    assert again == {"metric": "accuracy", "value": 0.8, "step": 80}
    assert best_after(*before, restored(50)) is None, "an older version does not report it"
    assert best_after(*before, restored(90)) == {"metric": "accuracy", "value": 0.9, "step": 80}
    assert best_after(*before, restored(0, "fresh", best=None)) is None


def test_of_two_checkpoints_of_one_step_the_later_attempts_is_the_latest() -> None:
    run = run_row()
    for name in (
        "step-000000030.s001.a1000",
        "step-000000030.s001.a999",
        "step-000000030.s001.a001",
    ):
        row = committed(30)
        run = replace(run, **project(run, replace(row, data=row.data | {"name": name})).columns)
    assert run.latest_checkpoint is not None
    assert run.latest_checkpoint["name"] == "step-000000030.s001.a1000"


@pytest.mark.parametrize(
    ("kind", "data", "status"),
    [
        (EventKind.FAILURE, {"verdict": "node_lost"}, RunStatus.RECOVERING),
        (EventKind.ATTEMPT_ENDED, {"cause": "worker_lost"}, RunStatus.RECOVERING),
        (EventKind.ATTEMPT_ENDED, {"cause": "resized"}, None),
        (EventKind.ATTEMPT_ENDED, {"cause": "finished"}, None),
        (EventKind.FINISHED, {"outcome": "succeeded", "reason": None}, RunStatus.SUCCEEDED),
        (
            EventKind.FINISHED,
            {"outcome": "failed", "reason": {"code": "user_error", "message": "m"}},
            RunStatus.FAILED,
        ),
        (EventKind.FINISHED, {"outcome": "stopped", "reason": None}, RunStatus.PAUSED),
    ],
)
def test_ends_of_attempts_and_runs(
    kind: str, data: dict[str, Any], status: RunStatus | None
) -> None:
    changes = project(run_row(world_size=2), event(kind, **data))
    assert changes.status == status
    assert (changes.columns["world_size"], changes.columns["workers"]) == (None, [])
    if status == RunStatus.FAILED:
        assert changes.reason is not None and changes.reason.code == ReasonCode.USER_ERROR


def test_waiting_says_what_for() -> None:
    changes = project(
        run_row(),
        event(EventKind.WAITING, code="waiting_for_capacity", message="1 CPU", missing={"CPU": 1}),
    )
    assert (changes.columns["reason_code"], changes.columns["reason_message"], changes.status) == (
        "waiting_for_capacity",
        "1 CPU",
        None,
    )
    unknown = project(run_row(), event(EventKind.WAITING, code="of a newer driver"))
    assert unknown.columns["reason_code"] == "waiting_for_capacity"


def test_kinds_of_a_newer_driver_change_nothing() -> None:
    assert project(run_row(), event("teleported", step=7)).columns == {}
