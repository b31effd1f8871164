"""Who ends a run, and what its last event says: user, deadline, verdict, last step."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.wire import ReasonCode
from everstep.wire.events import EventKind
from storage.errors import CorruptFile
from storage.filesystem import open_storage
from storage.logs.journal import JournalEvent
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from train_fn.recovery.hang import ProgressTracker
from train_fn.recovery.history import read_history
from train_fn.recovery.launch import ControllerOutcome
from train_fn.recovery.outcome import Stopping, ending, unfinished


def test_a_run_without_deadline_stops_when_its_user_asks() -> None:
    stopping = Stopping(None)
    assert stopping.decide(None, 1e12) is None
    assert [stopping.decide(asked, 1.0) for asked in ("pause", "cancel", None)] == [
        "pause",
        "cancel",
        "cancel",
    ]
    assert not stopping.overdue


def test_at_the_deadline_the_ranks_are_told_to_stop_whatever_is_asked_later() -> None:
    stopping = Stopping(100.0)
    assert stopping.decide(None, 99.9) is None
    assert stopping.decide(None, 100.0) == "cancel" and stopping.overdue
    assert stopping.decide("pause", 101.0) == "cancel" and stopping.overdue


def test_a_stop_of_the_user_s_comes_first_when_it_came_first() -> None:
    stopping = Stopping(100.0)
    assert stopping.decide("pause", 99.0) == "pause"
    assert stopping.decide(None, 101.0) == "pause" and not stopping.overdue, (
        "storage may be away meanwhile"
    )


def test_what_the_last_event_says() -> None:
    stopped = ControllerOutcome(finished=True, stopped="cancel", last_step=7)
    name, reason = ending(stopped, overdue=True)
    assert name == "failed" and reason is not None
    assert reason["code"] == ReasonCode.DEADLINE_EXCEEDED and "step 7" in reason["message"]
    assert ending(stopped, overdue=False) == (
        "stopped",
        {"code": "cancelled_by_user", "message": "stopped by request: cancel"},
    )
    assert ending(ControllerOutcome(finished=True, last_step=10), overdue=True) == (
        "succeeded",
        None,
    ), "all steps were done in time"
    paused = ControllerOutcome(finished=True, stopped="pause", last_step=7)
    assert ending(paused, overdue=False)[1]["code"] == ReasonCode.PAUSED_BY_USER  # type: ignore[index]
    name, reason = ending(paused, overdue=False, by_itself=True)
    assert (
        name == "stopped"
        and reason is not None
        and reason["code"] == ReasonCode.STORAGE_UNAVAILABLE
    )
    waits = ControllerOutcome(
        finished=False,
        stopped="pause",
        message="paused after 5 failures of the storage",
        last_step=7,
    )
    assert waits.decided and not ControllerOutcome(finished=False).decided
    name, reason = ending(waits, overdue=False, by_itself=True)
    assert (name, reason) == (
        "stopped",
        {"code": "storage_unavailable", "message": "paused after 5 failures of the storage"},
    )
    given_up = ControllerOutcome(
        finished=False, failed=ReasonCode.USER_ERROR, message="it raised twice"
    )
    assert ending(given_up, overdue=True) == (
        "failed",
        {"code": "user_error", "message": "it raised twice"},
    )


@pytest.mark.parametrize(
    ("step", "total_steps", "is_short"),
    [(50, 1000, True), (0, 1, True), (1000, 1000, False), (1001, 1000, False), (50, None, False)],
)
def test_a_run_below_its_total_has_not_succeeded(
    step: int, total_steps: int | None, is_short: bool
) -> None:
    message = unfinished(step, total_steps)
    assert (message is not None) is is_short
    assert message is None or f"step {step} of {total_steps}" in message


def test_a_total_holds_until_another_one_is_reported() -> None:
    """A user's function begins each attempt without one, and may return before it has one."""
    tracker = ProgressTracker()

    def note(attempt: int, kind: EventKind, **data: object) -> tuple[int, int | None]:
        tracker.note(kind, attempt, data, 1.0)
        return tracker.progress().step, tracker.progress().total_steps

    note(1, EventKind.ATTEMPT_STARTED)
    assert note(1, EventKind.TRAINING_STARTED, total_steps=None) == (0, None)
    note(1, EventKind.TRAINING_STARTED, total_steps=10)
    points = [{"step": 4, "at": 1.0, "values": {}}]
    assert note(1, EventKind.METRICS, points=points) == (4, 10)
    note(2, EventKind.ATTEMPT_STARTED)
    assert note(2, EventKind.RESTORED, step=3) == (3, 10)
    assert note(2, EventKind.TRAINING_STARTED, total_steps=None) == (3, 10)
    assert note(2, EventKind.TRAINING_STARTED, total_steps=3) == (3, 3)


def test_a_deadline_travels_in_the_run_directory(tmp_path: Path) -> None:
    run_dir = RunDir(open_storage(str(tmp_path)), "run_d")
    assert run_dir.deadline() is None
    run_dir.write_deadline(1234.5)
    assert run_dir.deadline() == 1234.5
    (tmp_path / "runs/run_d/control/deadline.json").write_text("{}")
    with pytest.raises(CorruptFile, match="does not hold a deadline"):
        run_dir.deadline()


def test_the_past_tells_whether_every_step_was_done(tmp_path: Path) -> None:
    run_dir = RunDir(open_storage(str(tmp_path)), "run_d")

    def tell(submission: int, *entries: tuple[EventKind, dict[str, object]]) -> None:
        with JournalWriter(run_dir, submission) as journal:
            journal.append(
                [
                    JournalEvent(
                        kind=kind,
                        at=1.0,
                        submission=submission,
                        attempt=1,
                        data=data,
                        source="driver",
                        source_n=n,
                    )
                    for n, (kind, data) in enumerate(entries, start=journal.last_n + 1)
                ]
            )

    def metrics(step: int) -> tuple[EventKind, dict[str, object]]:
        return EventKind.METRICS, {"points": [{"step": step, "at": 1.0, "values": {}}]}

    tell(1, (EventKind.TRAINING_STARTED, {"total_steps": 10}), metrics(9))
    assert not read_history(run_dir).steps_done
    tell(1, metrics(10))
    tell(2, (EventKind.TRAINING_STARTED, {"total_steps": None}), metrics(8))
    assert read_history(run_dir).steps_done, (
        "they were, before the driver was lost; a deadline no longer fails the run"
    )
