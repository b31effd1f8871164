"""What follows want of memory, if ``train.on_out_of_memory`` is ``smaller``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.spec.sections import RecoverySpec
from everstep.text import failure as failure_words
from everstep.wire import ErrorKind, ReasonCode, Verdict
from everstep.wire.events import EventKind
from storage.logs.journal import JournalEvent
from train_fn.recovery.decision import (
    Decision,
    PastFailure,
    decide,
    failures_in_a_row,
    micro_batch_size_after,
)
from train_fn.recovery.evidence import VERDICT_OF_KIND, Evidence, RankError, RankReport
from train_fn.recovery.history import History
from train_fn.recovery.outcome import failure_of
from train_fn.recovery.verdict import judge

DEVICE, HOST, USER = ErrorKind.DEVICE_MEMORY, ErrorKind.OUT_OF_MEMORY, ErrorKind.USER
BY_RAY = "Worker exit type: NODE_OUT_OF_MEMORY"


def evidence(kind: ErrorKind | None, phase: str | None = "step", step: int | None = 7) -> Evidence:
    """Return that of a rank that raised an error, or that Ray has killed for memory."""
    error = None
    if kind is not None:
        error = RankError(0, kind, "OutOfMemoryError", "no 2.00 GiB", "", step, phase, 1.0)
    report = RankReport(0, "n0", 100, died=error is None, death=BY_RAY, error=error)
    return Evidence(attempt=2, noticed_at=50.0, ranks=(report,), last_step=step)


def decided(
    found: Evidence, size: int | None, past: tuple[PastFailure, ...] = (), **budgets: int
) -> Decision:
    return decide(
        judge(found),
        past,
        RecoverySpec(**budgets),
        backoff_max_s=30.0,
        micro_batch_size=size,
    )


@pytest.mark.parametrize(
    ("kind", "phase", "size", "then"),
    [
        *((DEVICE, phase, 7, 3) for phase in ("first_pass", "data", "step", "evaluation")),
        *((DEVICE, phase, 7, None) for phase in ("start", "restore", "checkpoint", None)),
        (HOST, "step", 2, 1),
        (HOST, "step", None, None),
        (USER, "step", 7, None),
        (ErrorKind.DEVICE, "step", 7, None),
        (None, None, 16, 8),
        (None, None, 1, None),
    ],
)
def test_want_of_memory_in_training_halves_micro_batches_and_costs_no_budget(
    kind: ErrorKind | None, phase: str | None, size: int | None, then: int | None
) -> None:
    found = decided(evidence(kind, phase), size, max_system_failures=0 if then else 1)
    assert found.restart and found.micro_batch_size == then
    assert (found.budget is None) == (then is not None)
    if then is not None:
        words = f"restart at once with micro-batches of {then} in place of {size}"
        assert (found.action, found.backoff_s) == (words, 0.0)


def test_a_single_sample_that_is_too_much_ends_the_run_with_what_to_do() -> None:
    found = decided(evidence(DEVICE), 1)
    assert found.reason is ReasonCode.USER_ERROR
    for words in ("at step 7", "micro-batches of a single sample", "precision to bf16", "2.00 GiB"):
        assert words in str(found.message)


def after(past: tuple[PastFailure, ...], found: Evidence, decision: Decision) -> History:
    """Return the history once a submission's journal has the failure."""
    failure = failure_of(found, judge(found), decision, detect_s=None, world_size=1)
    failure_words.story(failure)
    data: dict[str, Any] = json.loads(json.dumps(failure.event_data()))
    event = JournalEvent(
        kind=EventKind.FAILURE,
        at=1.0,
        submission=1,
        attempt=2,
        data=data,
        source="controller",
        source_n=1,
    )
    return History(failures=past).with_event(event)


@given(
    st.integers(1, 300),
    st.lists(st.tuples(st.sampled_from([DEVICE, HOST, USER, None]), st.integers(0, 3))),
)
def test_micro_batches_become_smaller_by_want_of_memory_alone_and_never_empty(
    size: int, failures: list[tuple[ErrorKind | None, int]]
) -> None:
    history = History()
    for kind, step in failures:
        found = evidence(kind, step=step)
        decision = decided(found, size, history.failures, max_user_errors=9)
        if not decision.restart:
            return
        history = after(history.failures, found, decision)
        left = micro_batch_size_after(history.failures) or size
        needs = kind is None or VERDICT_OF_KIND[kind] is Verdict.OUT_OF_MEMORY
        assert left == (max(1, size // 2) if needs else size)
        size = left


def test_want_of_memory_at_one_step_ends_and_halving_counts_as_no_failure() -> None:
    history, size, times = History(), 64, 0
    while (decision := decided(evidence(HOST), size, history.failures)).restart:
        history, times = after(history.failures, evidence(HOST), decision), times + 1
        size = micro_batch_size_after(history.failures) or size
    assert (size, times) == (1, 6)
    assert failures_in_a_row(judge(evidence(None)), history.failures) == 1


def test_a_run_that_may_not_halve_them_is_told_of_the_option() -> None:
    for kind, times in ((DEVICE, 1), (HOST, 3)):
        past = tuple(after((), evidence(kind), decided(evidence(kind), None)).failures) * times
        assert decided(evidence(kind), None, past[1:]).restart
        found = decided(evidence(kind), None, past)
        assert not found.restart and "train.on_out_of_memory: smaller" in str(found.message)
    killed = decided(evidence(None), None, max_system_failures=0)
    assert "set train.on_out_of_memory to smaller" in str(killed.message)
