"""What events mean: pure functions over histories."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from everstep.spec.parsing import parse_spec
from everstep.wire import ReasonCode, RunStatus
from everstep.wire.events import EventKind
from service.db.new_run import new_row
from service.model.rows import CheckpointCheck, EventRow, MetricPoint
from service.model.run_rows import RunRow
from service.projections import attempts, checkpoints, failures, samples
from service.projections.downsampling import MIN_POINTS, downsample
from service.projections.handlers import project
from service.projections.protection import protection
from tests.support.api_service import NOON, spec


def run_row(status: RunStatus = RunStatus.RUNNING, **fields: Any) -> RunRow:
    wanted = parse_spec(spec(checkpoint={"best_metric": "accuracy"}, train={"epochs": 3}))
    return replace(
        new_row("run_000000000001", wanted, "tok", NOON), status=status, submission=1, **fields
    )


def event(
    kind: str, seq: int = 1, *, at: float = NOON, submission: int = 1, attempt: int = 1, **data: Any
) -> EventRow:
    return EventRow(seq, at, kind, submission, attempt, data)


def test_a_checkpoint_that_a_restore_passed_over_is_a_failure_of_storage() -> None:
    rejected = [
        {"name": "step-000000020.s001", "problem": "model.pt: expected 7 bytes, found 5 bytes"},
        {"name": "snapshot of step 25 by rank 0 of attempt 1", "problem": "cannot be read"},
    ]
    found = failures.failures(
        [
            event(EventKind.FAILURE, verdict="worker_lost", step=25),
            event(
                EventKind.RESTORED,
                attempt=2,
                step=10,
                source="checkpoint",
                checkpoint="step-000000010.s001",
                rejected=rejected,
            ),
            event(EventKind.RECOVERED, attempt=2, recovery_s=1.5, steps_lost=15),
        ]
    )
    assert [(each.verdict, each.step, each.recovery_s) for each in found] == [
        ("worker_lost", 25, 1.5),
        ("storage", 20, None),
    ]
    assert found[1].exception == rejected[0]["problem"]
    assert found[1].action == "continued from step 10 (step-000000010.s001)"
    assert found[1].budget is None


WORKERS = [{"rank": 0, "node_id": "n1", "node_ip": "10.0.0.1", "pid": 7}]


# ---------------------------------------------------------------- the row


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


def test_the_last_epoch_stays_in_progress() -> None:
    assert project(run_row(), event(EventKind.EPOCH_COMPLETED, epoch=0)).columns == {"epoch": 1}
    assert project(run_row(), event(EventKind.EPOCH_COMPLETED, epoch=2)).columns == {"epoch": 2}


def test_the_epochs_of_a_users_own_loop_are_not_bound_by_the_spec() -> None:
    code = {"archive": "sha256:" + "0" * 64, "train_fn": "train:train_fn"}
    own = replace(run_row(), spec=parse_spec({"name": "own", "code": code}).model_dump(mode="json"))
    unknown = project(own, event(EventKind.EPOCH_COMPLETED, epoch=6)).columns
    assert unknown == {"epoch": 7}
    known = replace(own, total_steps=80, steps_per_epoch=10)
    for epoch, shown in ((6, 7), (7, 7)):
        ended = project(known, event(EventKind.EPOCH_COMPLETED, epoch=epoch)).columns
        assert ended == {"epoch": shown}
    points = [{"step": 35, "at": NOON, "values": {"loss": 1.0}}]
    assert project(known, event(EventKind.METRICS, points=points)).columns["epoch"] == 3


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
    ahead = project(run_row(step=9), event(EventKind.RESTORED, step=10, epoch=1)).columns
    assert ahead["steps_lost"] == 0, "a survivor may know of steps that were never reported"


def committed(step: int, submission: int = 1, at: float = NOON) -> EventRow:
    name = f"step-{step:09d}.s{submission:03d}"
    return event(
        EventKind.CHECKPOINT_COMMITTED,
        at=at,
        submission=submission,
        step=step,
        epoch=0,
        name=name,
        size_bytes=step,
        digest="d" * 64,
        metrics={"accuracy": step / 100},
    )


def test_the_latest_checkpoint_is_of_the_lineage() -> None:
    run = run_row()
    for row in (committed(10), committed(20), committed(30)):
        run = replace(run, **project(run, row).columns)
    assert run.latest_checkpoint is not None and run.latest_checkpoint["step"] == 30
    deleted = project(
        run, event(EventKind.CHECKPOINT_DELETED, step=30, name="step-000000030.s001")
    ).columns
    assert deleted["latest_checkpoint"]["step"] == 20
    back = project(
        run, event(EventKind.RESTORED, submission=2, step=20, epoch=0, source="checkpoint")
    ).columns
    assert back["latest_checkpoint"]["step"] == 20, (
        "step 30 is of an older submission and beyond the restore"
    )
    rejected = [{"name": "step-000000030.s001", "problem": "size"}]
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
    for name in ("step-000000030.s001.a1000", "step-000000030.s001.a999", "step-000000030.s001"):
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


# ---------------------------------------------------------------- attempts and failures


def test_attempts_with_their_ends() -> None:
    found = attempts.attempts(
        [
            event(EventKind.SUBMISSION_STARTED),
            event(EventKind.ATTEMPT_STARTED, at=NOON, world_size=1, workers=WORKERS),
            event(EventKind.RESTORED, step=0, epoch=0, source="fresh", checkpoint=None),
            event(EventKind.CHECKPOINT_COMMITTED, step=10),
            event(EventKind.FAILURE, verdict="worker_lost", step=12),
            event(EventKind.ATTEMPT_ENDED, at=NOON + 5, cause="worker_lost", last_step=13),
            event(EventKind.ATTEMPT_STARTED, at=NOON + 6, attempt=2, world_size=1, workers=WORKERS),
            event(
                EventKind.RESTORED,
                step=10,
                epoch=1,
                source="checkpoint",
                checkpoint="step-000000010.s001",
            ),
            event(EventKind.SUBMISSION_STARTED, at=NOON + 9, submission=2),
            event(
                EventKind.ATTEMPT_STARTED,
                at=NOON + 10,
                submission=2,
                attempt=3,
                world_size=1,
                workers=WORKERS,
            ),
        ]
    )
    assert [(a.attempt, a.submission, a.first_step, a.last_step, a.cause) for a in found] == [
        (1, 1, 0, 13, "worker_lost"),
        (2, 1, 10, None, "control_plane"),
        (3, 2, None, None, None),
    ]
    assert found[1].restored_from == "step-000000010.s001"
    assert [(a.ended_at.timestamp() if a.ended_at else None) for a in found] == [
        NOON + 5,
        NOON + 9,
        None,
    ]
    assert found[0].workers[0].pid == 7


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        (event(EventKind.FINISHED, outcome="succeeded"), "finished"),
        (event(EventKind.FINISHED, outcome="stopped"), "stopped"),
        (event(EventKind.FINISHED, outcome="failed"), "unknown"),
        (event("status", to="CANCELLED"), "stopped"),
        (event("status", to="STOPPING"), None),
    ],
)
def test_an_attempt_whose_end_was_not_recorded(last: EventRow, cause: str | None) -> None:
    [found] = attempts.attempts(
        [event(EventKind.ATTEMPT_STARTED, world_size=1, workers=WORKERS), last]
    )
    assert found.cause == cause
    assert (found.ended_at is None) == (cause is None)


def test_a_failure_learns_from_its_recovery() -> None:
    found = failures.failures(
        [
            event(
                EventKind.FAILURE,
                verdict="worker_lost",
                first_rank=1,
                step=5,
                action="restart",
                evidence={"signal": 9},
            ),
            event(EventKind.FAILURE, verdict="made_up_later", detect_s=0.5, steps_lost=1),
            event(
                EventKind.RECOVERED,
                detect_s=9.0,
                recovery_s=1.5,
                steps_lost=2,
                world_size_before=2,
                world_size_after=1,
            ),
            event(EventKind.RECOVERED, detect_s=7.0),
        ]
    )
    assert [failure.verdict for failure in found] == ["worker_lost", "unknown"]
    assert (found[0].recovery_s, found[0].evidence, found[0].first_rank) == (None, {"signal": 9}, 1)
    last = found[1]
    assert (last.detect_s, last.recovery_s, last.steps_lost, last.world_size_after) == (
        0.5,
        1.5,
        1,
        1,
    )


# ---------------------------------------------------------------- checkpoints and samples


def failed_save(in_a_row: int, seq: int = 1) -> EventRow:
    data = {
        "step": 10,
        "error": "StorageFull: no space left",
        "failed_in_a_row": in_a_row,
        "max_failed_saves": 3,
        "retry_s": 4.0,
    }
    return event(EventKind.CHECKPOINT_FAILED, seq, at=NOON + seq, **data)


def test_a_run_whose_saves_fail_says_so_while_it_trains_and_until_one_succeeds() -> None:
    run = run_row(latest_checkpoint={"step": 5})
    assert project(run, failed_save(2)).columns == {}
    assert (
        project(
            run, event(EventKind.CHECKPOINT_FAILED, step=1, error="told by an older driver")
        ).columns
        == {}
    )
    unavailable = project(run, failed_save(3))
    assert (
        unavailable.status is None
        and unavailable.columns["reason_code"] == ReasonCode.STORAGE_UNAVAILABLE
    )
    message = unavailable.columns["reason_message"]
    assert (
        message.startswith("3 saves in a row failed, the newest checkpoint is of step 5")
        and "no space left" in message
    )
    assert project(run_row(RunStatus.STOPPING), failed_save(3)).columns == {}, (
        "a status with a reason of its own keeps it"
    )
    cleared = project(replace(run, **unavailable.columns), committed(20)).columns
    assert (cleared["reason_code"], cleared["reason_message"]) == (None, None)
    other = run_row(RunStatus.RUNNING, reason_code="waiting_for_capacity")
    assert "reason_code" not in project(other, committed(20)).columns


def test_a_run_that_waits_for_its_storage_says_so_until_it_starts_again() -> None:
    failed = event(
        EventKind.FAILURE,
        verdict="storage",
        exception="StorageDenied: /mnt",
        action="wait for the storage, restart",
    )
    waits = project(run_row(RunStatus.RUNNING), failed)
    assert waits.status is RunStatus.RECOVERING and waits.reason is not None
    assert waits.reason.code is ReasonCode.STORAGE_UNAVAILABLE and "/mnt" in waits.reason.message
    again = project(run_row(RunStatus.RECOVERING), failed)
    assert again.status is None and again.columns["reason_code"] == ReasonCode.STORAGE_UNAVAILABLE
    assert "reason_code" not in project(run_row(RunStatus.STOPPING), failed).columns
    assert (
        project(run_row(RunStatus.RUNNING), event(EventKind.FAILURE, verdict="node_lost")).reason
        is None
    )


def test_saves_that_fail_are_one_failure_and_leave_recoveries_to_the_others() -> None:
    lost = event(EventKind.FAILURE, 1, verdict="node_lost", action="restart")
    saves = [failed_save(number, seq=1 + number) for number in (1, 2, 3, 4)]
    recovered = event(EventKind.RECOVERED, 9, recovery_s=2.5)
    found = failures.failures([lost, *saves, recovered])
    assert [(item.verdict, item.recovery_s) for item in found] == [
        ("node_lost", 2.5),
        ("storage", None),
    ]
    assert found[1].exception == "StorageFull: no space left" and found[1].step == 10


def test_checkpoints_of_the_lineage() -> None:
    history = [
        committed(10),
        committed(20),
        committed(30),
        event(EventKind.CHECKPOINT_DELETED, step=10, name="step-000000010.s001"),
        event(EventKind.RESTORED, submission=2, step=20, epoch=0, source="checkpoint"),
        committed(30, 2),
    ]
    found = checkpoints.checkpoints(history, {})
    assert [(item.name, item.state) for item in found] == [
        ("step-000000010.s001", "deleted"),
        ("step-000000020.s001", "committed"),
        ("step-000000030.s002", "committed"),
    ]
    newest = checkpoints.newest(found)
    assert newest is not None and newest.name == "step-000000030.s002"
    best = checkpoints.best(found, "val_accuracy", "max")
    assert best is not None and best.step == 30
    worst = checkpoints.best(found, "accuracy", "min")
    assert worst is not None and worst.step == 20, "step 10 is deleted"
    scored = [committed(10), committed(20), committed(30)]
    for entry, metrics in zip(
        scored, ({"accuracy": 0.8}, {"accuracy": 0.9}, {"accuracy": 0.9}), strict=True
    ):
        entry.data["metrics"] = metrics
    best = checkpoints.best(checkpoints.checkpoints(scored, {}), "accuracy", "max")
    assert best is not None and best.step == 20, (
        "a later one that is as good may only repeat what was measured before it"
    )
    scored[0].data["metrics"] = {}
    late = [*scored, event(EventKind.EVALUATED, step=10, epoch=0, metrics={"accuracy": 0.95})]
    best = checkpoints.best(checkpoints.checkpoints(late, {}), "accuracy", "max")
    assert best is not None and best.step == 10, "saved before it was evaluated"
    assert checkpoints.best(found, None, "max") is None
    assert checkpoints.best(found, "f1", "max") is None
    assert checkpoints.at_step(found, 40) is None
    deleted = checkpoints.at_step(found, 10)
    assert deleted is not None and deleted.state == "deleted"


def test_a_checkpoint_that_a_later_submission_reports_is_of_the_one_that_wrote_it() -> None:
    """Submission 1 died after attempt 5 had committed and before it could report that."""
    reported = committed(60, 2)
    reported.data["name"] = "step-000000060.s001.a005"
    history = [
        replace(event(EventKind.RESTORED, 1, step=60, epoch=0, source="checkpoint"), submission=2),
        reported,
    ]
    back = event(
        EventKind.RESTORED, 3, submission=2, attempt=3, step=30, epoch=0, source="snapshot"
    )
    run = run_row()
    for row in history:
        run = replace(run, **project(run, row).columns)
    assert [item["submission"] for item in run.recent_checkpoints] == [1]
    assert [item.submission for item in checkpoints.checkpoints(history, {})] == [1]
    assert checkpoints.checkpoints([*history, back], {}) == []
    assert project(run, back).columns["recent_checkpoints"] == []


def test_what_an_older_attempt_commits_beyond_a_newer_ones_beginning_is_not_in_the_lineage() -> (
    None
):
    """Also where it was told before the newer one began: its rank was given up, not dead."""
    by_attempts = [committed(step) for step in (20, 60, 60)]
    for entry, attempt in zip(by_attempts, (1, 1, 2), strict=True):
        entry.data["name"] = f"step-{entry.data['step']:09d}.s001.a{attempt:03d}"
    begins = replace(event(EventKind.RESTORED, step=30, epoch=0, source="snapshot"), attempt=2)
    history = [*by_attempts[:2], begins, by_attempts[2]]
    names = ["step-000000020.s001.a001", "step-000000060.s001.a002"]
    assert [item.name for item in checkpoints.checkpoints(history, {})] == names
    run = run_row()
    for row in history:
        run = replace(run, **project(run, row).columns)
    assert [item["name"] for item in run.recent_checkpoints] == names
    both = checkpoints.checkpoints([by_attempts[2], by_attempts[1]], {})
    found = (
        checkpoints.newest(both),
        checkpoints.at_step(both, 60),
        checkpoints.best(both, "val_accuracy", "max"),
    )
    assert [item and item.name for item in found] == [names[1]] * 3, (
        "of one step the newer attempt's counts"
    )


def test_checks_and_rejections_show() -> None:
    rejected = event(
        EventKind.RESTORED,
        at=NOON + 5,
        step=0,
        epoch=0,
        source="fresh",
        rejected=[{"name": "step-000000010.s001", "problem": "size"}],
    )
    [found] = checkpoints.checkpoints([committed(10), rejected], {})
    assert (found.state, found.problem) == ("corrupt", "size")
    sound = CheckpointCheck("step-000000010.s001", NOON + 9, None)
    [found] = checkpoints.checkpoints([committed(10), rejected], {sound.name: sound})
    assert (found.state, found.problem, found.verified_at) == (
        "committed",
        None,
        datetime.fromtimestamp(NOON + 9, UTC),
    )
    broken = CheckpointCheck("step-000000010.s001", NOON + 1, "digest")
    [found] = checkpoints.checkpoints([committed(10)], {broken.name: broken})
    assert (found.state, found.problem) == ("corrupt", "digest")
    [again] = checkpoints.checkpoints(
        [committed(10), committed(10, at=NOON + 2)], {broken.name: broken}
    )
    assert again.state == "committed", "it was written anew after the check"


def epoch(number: int, **counts: int) -> EventRow:
    data = {"samples": 10, "used_once": 10, "duplicates": 0, "missing": 0} | counts
    return event(EventKind.EPOCH_COMPLETED, epoch=number, digest=f"d{number}", seconds=1.0, **data)


def test_samples_of_the_lineage() -> None:
    found = samples.samples(
        [epoch(0), epoch(1, missing=1), event(EventKind.RESTORED, step=15, epoch=1), epoch(1)]
    )
    assert [(item.epoch, item.missing, item.digest) for item in found.epochs] == [
        (0, 0, "d0"),
        (1, 0, "d1"),
    ]
    back = samples.samples([epoch(0), epoch(1), event(EventKind.RESTORED, step=5, epoch=0)])
    assert back.epochs == ()


# ---------------------------------------------------------------- protection and thinning


def test_protection() -> None:
    run = run_row(step=15, latest_checkpoint={"step": 10, "committed_at": NOON, "size_bytes": 1})
    assert protection(run).model_dump() == {
        "survives": ("rank", "node", "driver"),
        "worst_case_steps_lost": 5,
        "process_loss": None,
        "node_loss": None,
        "message": "No rank trains now.",
    }
    assert protection(run_row(step=15)).worst_case_steps_lost == 15
    ended = protection(replace(run, status=RunStatus.SUCCEEDED))
    assert (ended.survives, ended.worst_case_steps_lost, ended.process_loss) == ((), 0, None)


@pytest.mark.parametrize(
    ("snapshots", "process_loss", "node_loss", "said"),
    [
        ("survivors", "no_steps", "no_steps", "ranks on other nodes keep the state"),
        ("published", "few_steps", "checkpoint", "All ranks run on one node"),
        ("none", "checkpoint", "checkpoint", "no node keeps the state"),
        (None, "checkpoint", "checkpoint", "no node keeps the state"),
    ],
)
def test_protection_says_what_each_death_would_cost(
    snapshots: str | None, process_loss: str, node_loss: str, said: str
) -> None:
    found = protection(run_row(workers=WORKERS, snapshots=snapshots))
    assert (found.process_loss, found.node_loss) == (process_loss, node_loss)
    assert found.message is not None and said in found.message
    spec_without = {
        **run_row().spec,
        "recovery": {**run_row().spec["recovery"], "max_system_failures": 0},
    }
    fragile = protection(run_row(workers=WORKERS, snapshots=snapshots, spec=spec_without))
    assert (fragile.survives, fragile.process_loss, fragile.node_loss) == (("driver",), None, None)


def test_protection_follows_what_rank_0_reports() -> None:
    run = run_row(attempt=1, workers=WORKERS, snapshots="published")
    changed = project(
        run, event(EventKind.SNAPSHOTS, step=5, snapshots="none", problem="does not fit")
    )
    assert changed.columns == {"snapshots": "none"}
    again = project(run, event(EventKind.ATTEMPT_STARTED, attempt=2, world_size=1, workers=WORKERS))
    assert again.columns["snapshots"] is None, "the next attempt may run elsewhere"
    assert (
        project(run, event(EventKind.TRAINING_STARTED, snapshots="survivors")).columns["snapshots"]
        == "survivors"
    )


def test_thinning_keeps_extremes_and_ends() -> None:
    points = [(step, NOON + step, float(step % 7)) for step in range(10_000)]
    points[5432] = (5432, NOON + 5432, 1e6)
    points[77] = (77, NOON + 77, -1e6)
    points[4000] = (4000, NOON + 4000, None)
    for max_points in (MIN_POINTS, 5, 50, 500, 9_999):
        thin = downsample(points, max_points)
        assert len(thin) <= max_points
        assert {points[5432], points[77]} <= set(thin), max_points
        assert (thin[0], thin[-1]) == (points[0], points[-1])
        assert thin == sorted(thin, key=lambda point: point[0])
        if max_points >= 5:
            assert points[4000] in thin
    assert downsample(points, 10_000) == points
    assert downsample([], 10) == []
