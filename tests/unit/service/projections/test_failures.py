"""Failures with their recoveries, and saves that fail, from the events of a run."""

from __future__ import annotations

from dataclasses import replace

from everstep.wire import ReasonCode, RunStatus
from everstep.wire.events import EventKind
from service.model.rows import EventRow
from service.projections import attempts
from service.projections.handlers import project
from tests.support.api_service import NOON
from tests.support.projected_events import committed, event, run_row


def test_a_checkpoint_that_a_restore_passed_over_is_a_failure_of_storage() -> None:
    rejected = [
        {
            "name": "step-000000020.s001.a001",
            "problem": "model.pt: expected 7 bytes, found 5 bytes",
        },
        {"name": "snapshot of step 25 by rank 0 of attempt 1", "problem": "cannot be read"},
    ]
    found = attempts.failures(
        [
            event(EventKind.FAILURE, verdict="worker_lost", step=25),
            event(
                EventKind.RESTORED,
                attempt=2,
                step=10,
                source="checkpoint",
                checkpoint="step-000000010.s001.a001",
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
    assert found[1].action == "continued from step 10 (step-000000010.s001.a001)"
    assert found[1].budget is None


# ---------------------------------------------------------------- attempts and failures


def test_a_failure_learns_from_its_recovery() -> None:
    found = attempts.failures(
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
                attempt=2,
                detect_s=9.0,
                recovery_s=1.5,
                steps_lost=2,
                world_size_before=2,
                world_size_after=1,
            ),
            event(EventKind.RECOVERED, attempt=2, detect_s=7.0),
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


def test_a_recovery_that_is_told_of_late_is_not_that_of_the_next_failure() -> None:
    """The ranks' node stood still, with what it had to tell, until it was given up."""
    found = attempts.failures(
        [
            event(EventKind.FAILURE, attempt=2, verdict="worker_lost"),
            event(EventKind.FAILURE, attempt=3, verdict="node_lost"),
            event(EventKind.RECOVERED, attempt=3, rung="in_process", steps_lost=0),
            event(EventKind.FAILURE, attempt=3, verdict="control_plane"),
            event(EventKind.RECOVERED, attempt=4, rung="checkpoint", steps_lost=4),
        ]
    )
    assert [(each.verdict, each.rung, each.steps_lost) for each in found] == [
        ("worker_lost", "in_process", 0),
        ("node_lost", None, None),
        ("control_plane", "checkpoint", 4),
    ]


def failed_save(in_a_row: int, seq: int = 1) -> EventRow:
    data = {
        "step": 10,
        "error": "StorageFull: no space left",
        "failed_in_a_row": in_a_row,
        "max_failed_saves": 3,
        "retry_s": 4.0,
    }
    return event(EventKind.CHECKPOINT_FAILED, seq, at=NOON + seq, **data)


# ---------------------------------------------------------------- checkpoints and samples


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
    recovered = event(EventKind.RECOVERED, 9, attempt=2, recovery_s=2.5)
    found = attempts.failures([lost, *saves, recovered])
    assert [(item.verdict, item.recovery_s) for item in found] == [
        ("node_lost", 2.5),
        ("storage", None),
    ]
    assert found[1].exception == "StorageFull: no space left" and found[1].step == 10
