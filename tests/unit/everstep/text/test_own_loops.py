"""What is said of a script that reports no steps: nobody knows how many were lost."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from everstep.client.handles import run_html
from everstep.text import events, failure, words
from everstep.text.events import summary as ending_of
from everstep.wire import Event, Failure
from everstep.wire.events import EventKind
from everstep.wire.run import Links, Run, RunStatus
from service.model.rows import EventRow
from service.projections import attempts

AT = datetime(2026, 1, 1, tzinfo=UTC)
FAILED = {"verdict": "worker_lost", "first_rank": 1, "evidence": {"worked_s": 12.0}}
RECOVERED = {
    "recovery_s": 2.0,
    "steps_lost": None,
    "world_size_before": 2,
    "world_size_after": 2,
}


def event(kind: EventKind, **data: Any) -> Event:
    return Event.model_validate(
        {"seq": 1, "at": AT, "kind": kind, "submission": 1, "attempt": 2, "data": data}
    )


def test_why_says_how_long_may_be_done_again_and_claims_no_steps() -> None:
    line = failure.story(Failure.of(event(EventKind.FAILURE, **FAILED)))[-1]
    assert "at most 12.0 s of work done again" in line and "lost" not in line
    assert events.event(event(EventKind.RECOVERED, **RECOVERED)) == (
        "recovered in 2.0 s: 2 -> 2 ranks"
    )
    started = events.event(event(EventKind.RESTORED, step=0, source="own_files"))
    assert started == "the script starts again, at the checkpoints that it wrote itself"
    running = event(EventKind.TRAINING_STARTED, device="cpu", backend="gloo", total_steps=None)
    assert events.event(running) == "training on cpu over gloo: its own loop"


def test_reports_of_a_function_are_called_so_and_the_work_between_them_is_said() -> None:
    """Two steps lost would be true of reports only: the epoch between two of them is done again."""
    cost = {**RECOVERED, "steps_lost": 2, "unit": "reports", "since_report_s": 12.0}
    words = "2 reports lost and at most 12.0 s of work since the last one done again"
    assert events.event(event(EventKind.RECOVERED, **cost)) == (
        f"recovered in 2.0 s: 2 -> 2 ranks, {words}"
    )
    failed = {"verdict": "worker_lost", "first_rank": 1, "evidence": {}}
    rows = [
        EventRow(attempt, float(attempt), kind, 1, attempt, data)
        for attempt, kind, data in (
            (1, EventKind.FAILURE, failed),
            (2, EventKind.RECOVERED, {**cost, "phases": {}}),
        )
    ]
    [found] = attempts.failures(rows)
    assert words in failure.story(found)[-1] and words in failure.sentence(found)
    unknown = {**cost, "since_report_s": None}
    assert events.event(event(EventKind.RECOVERED, **unknown)).endswith("2 reports lost")


def test_a_run_whose_steps_are_reports_says_how_long_was_done_again() -> None:
    def lost(**fields: Any) -> str:
        return failure.of_run(Run.model_construct(restarts=2, step=9, **fields))

    redone = "at most 24.0 s of work between reports done again"
    assert lost(steps_lost=2, redone_s=24.0) == f"2 reports lost and {redone}"
    assert lost(steps_lost=1, redone_s=0.0) == "1 report lost"
    early = Run.model_construct(restarts=1, step=0, steps_lost=0, redone_s=24.0)
    assert failure.of_run(early) == f"0 reports lost and {redone}", "before its first report"
    shown = Run.model_construct(
        id="run_1",
        name="mine",
        reason=None,
        status=RunStatus.RUNNING,
        step=9,
        total_steps=None,
        world_size=None,
        metrics={},
        restarts=2,
        steps_lost=2,
        redone_s=24.0,
        links=Links(ray_dashboard=None, ray_job=None, dashboard=None),
    )
    assert f"2, 2 reports lost and {redone}" in run_html(shown)


def test_a_script_that_succeeded_without_steps_is_at_none() -> None:
    def summary(**fields: Any) -> str:
        return ending_of(
            Run.model_construct(
                **{
                    "created_at": AT,
                    "finished_at": None,
                    "metrics": {},
                    "reason": None,
                    "steps_lost": 0,
                    "total_steps": None,
                    **fields,
                }
            )
        )

    assert summary(status="SUCCEEDED", step=0, restarts=1) == (
        "SUCCEEDED; 1 restart, no steps reported"
    )
    assert summary(status="SUCCEEDED", step=9, restarts=0) == (
        "SUCCEEDED at step 9; 0 restarts, 0 steps lost"
    )
    assert summary(status="CANCELLED", step=0, restarts=0).startswith("CANCELLED at step 0; ")
    ended = Run.model_construct(status="SUCCEEDED", step=0, total_steps=None)
    assert words.progress(ended) == "none reported"
