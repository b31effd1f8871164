"""Failures of a run in a row, and what counts as progress between them."""

from __future__ import annotations

import pytest

from everstep.wire import Verdict
from train_fn.recovery.decision import (
    PastFailure,
    backoff,
    budget_of,
    failures_in_a_row,
)
from train_fn.recovery.verdict import Judgement

LOST = Judgement(Verdict.WORKER_LOST, 0, "a", 10, None, "s")


def past(*steps: int | None, verdict: Verdict = Verdict.WORKER_LOST) -> list[PastFailure]:
    return [PastFailure(verdict, step, "s") for step in steps]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((), 1),
        ((10, 10), 3),
        ((9, 10), 2),
        ((10, 9), 1),
        ((None, 10), 2),
        ((10, None), 3),
        ((12,), 2),
    ],
)
def test_failures_count_back_to_the_last_at_a_smaller_step(
    steps: tuple[int | None, ...], expected: int
) -> None:
    """One at an unknown step counts at the step of the one before it, at 0 if it is the first."""
    assert failures_in_a_row(LOST, past(*steps)) == expected


def test_only_failures_of_one_budget_are_in_a_row() -> None:
    assert failures_in_a_row(LOST, past(10, verdict=Verdict.STORAGE)) == 1
    assert failures_in_a_row(LOST, past(10, verdict=Verdict.HANG)) == 2, "both are of the system"
    mixed = [*past(10), *past(10, verdict=Verdict.PREEMPTION), *past(10)]
    assert failures_in_a_row(LOST, mixed) == 3, "another one does not interrupt the row"
    assert budget_of(Verdict.HANG) == budget_of(Verdict.NODE_LOST) == "system_failures"
    assert budget_of(Verdict.USER_ERROR) == "user_errors"


def test_the_pause_doubles_from_the_third_failure_on_up_to_its_limit() -> None:
    assert [backoff(in_a_row, 30.0) for in_a_row in range(1, 11)] == [
        *(0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0)
    ]
    assert backoff(10_000, 1e9) == 0.5 * 2**16, "no number grows without end"
