"""Every second of a run lies in exactly one bucket."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.text.words import first_start
from everstep.wire import FirstStart, Goodput, RunStatus, Verdict
from everstep.wire.events import EventKind
from service.model.rows import EventRow
from service.projections.goodput import BUCKETS, TimeLedger, to_us

BEGIN = 1_000.0


def event(kind: str, at: float, *, attempt: int = 1, **data: Any) -> EventRow:
    return EventRow(1, BEGIN + at, kind, 1, attempt, data)


def steps(*pairs: tuple[int, float]) -> EventRow:
    return event(
        EventKind.METRICS,
        0.0,
        points=[{"step": step, "at": BEGIN + at, "values": {}} for step, at in pairs],
    )


def goodput(begin: float, events: list[EventRow], end: float, *, own: bool = False) -> Goodput:
    ledger = TimeLedger.begin(begin)
    for each in events:
        ledger.apply(each, latest=end, is_own_loop=own)
    return ledger.close(end)


def buckets(events: list[EventRow], end: float) -> dict[str, float]:
    """Buckets that are not empty, in seconds."""
    found = goodput(BEGIN, events, BEGIN + end)
    assert found.wall_s == pytest.approx(end)
    return {name: value for name, value in found.buckets.model_dump().items() if value}


def test_a_recovery_that_is_told_of_once_its_attempt_has_failed_is_no_work() -> None:
    history = [
        status(0, RunStatus.STARTING),
        event(EventKind.TRAINING_STARTED, 0),
        steps((1, 1)),
        event(EventKind.FAILURE, 2, attempt=1, detect_s=1.0),
        event(EventKind.FAILURE, 5, attempt=2),
        event(EventKind.RECOVERED, 6, attempt=2),
        event(EventKind.ATTEMPT_ENDED, 6, attempt=2, cause="node_lost"),
        event(EventKind.RECOVERED, 20, attempt=3),
        steps((2, 21)),
    ]
    assert buckets(history, 21) == pytest.approx(
        {"productive": 2, "detecting": 1, "restarting": 18}
    )


def status(at: float, to: RunStatus) -> EventRow:
    return event("status", at, **{"to": to.value})


def test_an_uninterrupted_run() -> None:
    history = [
        status(2, RunStatus.STARTING),
        event(EventKind.TRAINING_STARTED, 5),
        steps((1, 6), (2, 7), (3, 8)),
        event(EventKind.CHECKPOINT_COMMITTED, 9, step=3, stall_s=0.5),
        event(EventKind.ATTEMPT_ENDED, 10, cause="finished"),
        status(11, RunStatus.SUCCEEDED),
    ]
    found = goodput(BEGIN, history, BEGIN + 11)
    assert found.goodput == pytest.approx(4.5 / 11)
    assert buckets(history, 11) == pytest.approx(
        {"queued": 2, "starting": 3, "productive": 4.5, "checkpoint_stall": 0.5, "idle": 1}
    )


def test_a_failure_is_detected_restarted_from_and_made_good() -> None:
    history = [
        status(0, RunStatus.STARTING),
        event(EventKind.TRAINING_STARTED, 0),
        steps((1, 1), (2, 2), (3, 3)),
        event(EventKind.FAILURE, 5, verdict="worker_lost", detect_s=None),
        event(EventKind.RESTORED, 7, step=1),
        event(EventKind.TRAINING_STARTED, 7),
        steps((2, 8), (3, 9), (4, 10)),
    ]
    assert buckets(history, 10) == pytest.approx(
        {"productive": 4, "detecting": 2, "restarting": 3, "rework": 1}
    )
    history[3] = event(EventKind.FAILURE, 5, verdict="worker_lost", detect_s=0.5)
    assert buckets(history, 10)["detecting"] == pytest.approx(0.5)
    history[3] = event(EventKind.FAILURE, 5, verdict="worker_lost", detect_s=100.0)
    assert buckets(history, 10)["detecting"] == pytest.approx(5), "never more than there was"


@pytest.mark.parametrize("detect_s", [None, 0.0, 5.0, 12.8])
def test_time_without_progress_is_never_productive(detect_s: float | None) -> None:
    """A rank is stopped after step 3, and taken for hung 12.8 s later; older drivers told 0.0 of
    it."""
    history = [
        status(0, RunStatus.STARTING),
        event(EventKind.TRAINING_STARTED, 0),
        steps((1, 1), (2, 2), (3, 3)),
        event(EventKind.FAILURE, 15.8, verdict="hang", detect_s=detect_s),
        event(EventKind.RECOVERED, 17, attempt=2),
        steps((4, 17), (5, 18)),
    ]
    found = buckets(history, 18)
    detecting_s = 12.8 if detect_s is None else detect_s
    assert found["productive"] == pytest.approx(3 + 1)
    assert found.get("detecting", 0) == pytest.approx(detecting_s) and found[
        "restarting"
    ] == pytest.approx(1.2 + 12.8 - detecting_s)


@pytest.mark.parametrize(
    ("lost", "detecting_s"),
    [
        (event(EventKind.FAILURE, 15, verdict="worker_lost", detect_s=2.0), 2),
        (event(EventKind.FAILURE, 15, verdict="worker_lost", detect_s=None), 0),
        (event(EventKind.SUBMISSION_STARTED, 15), 0),
        (event(EventKind.ATTEMPT_ENDED, 15, cause=Verdict.WORKER_LOST.value), 0),
        (status(15, RunStatus.RECOVERING), 0),
    ],
)
def test_an_own_loop_worked_until_it_failed(lost: EventRow, detecting_s: float) -> None:
    """What it did since its last report may be kept or not, but it was no restart."""
    history = [
        status(0, RunStatus.STARTING),
        event(EventKind.TRAINING_STARTED, 0),
        steps((1, 3)),
        lost,
        event(EventKind.RECOVERED, 17, attempt=2),
    ]
    found = goodput(BEGIN, history, BEGIN + 20, own=True).buckets.model_dump()
    assert {name: value for name, value in found.items() if value} == pytest.approx(
        {"productive": 3 + 3, "unreported": 12 - detecting_s, "restarting": 2}
        | ({"detecting": detecting_s} if detecting_s else {})
    )


def test_an_evaluation_is_progress_and_what_is_told_late_is_none() -> None:
    history = [
        status(0, RunStatus.STARTING),
        event(EventKind.TRAINING_STARTED, 0),
        steps((1, 1)),
        event(EventKind.EVALUATED, 8),
        event(EventKind.FAILURE, 10, verdict="worker_lost", detect_s=None),
        steps((2, 9)),  # by a survivor that took its time
        event(EventKind.RESTORED, 12, step=2),
        event(EventKind.RECOVERED, 13, attempt=2),
    ]
    assert buckets(history, 14) == pytest.approx({"productive": 9, "detecting": 2, "restarting": 3})


def test_points_that_are_told_once_more_after_a_recovery_are_no_rework() -> None:
    """The first step travels alone; those that a dead rank may not have told follow with the next
    one."""
    history = [
        status(0, RunStatus.STARTING),
        event(EventKind.TRAINING_STARTED, 1),
        steps((1, 31), (2, 61)),
        event(EventKind.FAILURE, 62, verdict=Verdict.WORKER_LOST.value, detect_s=0),
        event(EventKind.RESTORED, 63, step=2),
        event(EventKind.RECOVERED, 64, attempt=2),
        steps((3, 64)),
        steps((1, 31), (2, 61), (4, 94)),
        steps((5, 124)),
    ]
    found = buckets(history, 124)
    assert "rework" not in found and found["productive"] == pytest.approx(30 + 30 + 30 + 30), (
        "nor the second without a step"
    )


def test_a_driver_that_vanishes() -> None:
    history = [
        status(0, RunStatus.STARTING),
        event(EventKind.TRAINING_STARTED, 0),
        steps((1, 1)),
        status(4, RunStatus.RECOVERING),
        event(EventKind.SUBMISSION_STARTED, 6),
        event(EventKind.RECOVERED, 8, attempt=2),
    ]
    assert buckets(history, 9) == pytest.approx({"productive": 2, "detecting": 3, "restarting": 4})


def test_pauses_and_waiting() -> None:
    history = [
        status(1, RunStatus.STARTING),
        event(EventKind.WAITING, 2),
        event(EventKind.ATTEMPT_STARTED, 5),
        event(EventKind.TRAINING_STARTED, 6),
        steps((1, 7)),
        event(EventKind.ATTEMPT_ENDED, 8, cause="stopped"),
        status(9, RunStatus.PAUSED),
        status(20, RunStatus.QUEUED),
        status(21, RunStatus.STARTING),
    ]
    assert buckets(history, 22) == pytest.approx(
        {"queued": 2, "starting": 3, "idle": 4, "productive": 2, "paused": 11}
    )


def test_the_first_start_tells_its_parts_and_a_restart_does_not_change_them() -> None:
    history = [
        status(2, RunStatus.STARTING),
        event(EventKind.SUBMISSION_STARTED, 9),
        event(EventKind.ATTEMPT_STARTED, 12),
        event(EventKind.RESTORED, 14, step=0),
        event(EventKind.TRAINING_STARTED, 15),
        steps((1, 15.5), (2, 16)),
    ]
    again = [
        event(EventKind.FAILURE, 20, detect_s=0.5),
        event(EventKind.ATTEMPT_STARTED, 21),
        event(EventKind.RESTORED, 22, step=2),
        event(EventKind.TRAINING_STARTED, 23),
        steps((3, 24)),
    ]
    expected = FirstStart(queued_s=2, job_s=7, ranks_s=3, model_s=2, data_s=1, step_s=0.5)
    assert goodput(BEGIN, history, BEGIN + 30).first_start == expected
    assert goodput(BEGIN, history + again, BEGIN + 30).first_start == expected
    assert goodput(BEGIN, history[:2], BEGIN + 30).first_start == FirstStart(queued_s=2, job_s=7)
    assert first_start(expected) == (
        "15.5 s after submission: queued 2.0 s, Ray job and driver 7.0 s, processes of the ranks "
        "3.0 s, model and state 2.0 s, optimizer and data 1.0 s, first step 0.5 s"
    )
    assert first_start(FirstStart(queued_s=2)) == "queued 2.0 s"


TIMES = st.floats(-50, 500, allow_nan=False)
DURATIONS = st.none() | st.floats(-5, 1000, allow_nan=False)
STEPS = st.integers(0, 40)


def any_event() -> st.SearchStrategy[EventRow]:
    """Any event with any times, as clocks that disagree and drivers that die may write them."""
    causes = st.sampled_from(["finished", "stopped", "resized", *Verdict])
    return st.one_of(
        st.builds(status, TIMES, st.sampled_from(RunStatus)),
        st.builds(lambda pairs: steps(*pairs), st.lists(st.tuples(STEPS, TIMES), max_size=5)),
        st.builds(lambda at, d: event(EventKind.FAILURE, at, detect_s=d), TIMES, DURATIONS),
        st.builds(
            lambda at, d: event(EventKind.CHECKPOINT_COMMITTED, at, step=1, stall_s=d),
            TIMES,
            DURATIONS,
        ),
        st.builds(lambda at, s: event(EventKind.RESTORED, at, step=s), TIMES, STEPS),
        st.builds(lambda at, c: event(EventKind.ATTEMPT_ENDED, at, cause=c), TIMES, causes),
        st.builds(
            event,
            st.sampled_from(
                [
                    EventKind.WAITING,
                    EventKind.SUBMISSION_STARTED,
                    EventKind.ATTEMPT_STARTED,
                    EventKind.TRAINING_STARTED,
                    EventKind.RECOVERED,
                    EventKind.EVALUATED,
                    "of a newer driver",
                ]
            ),
            TIMES,
        ),
    )


@given(history=st.lists(any_event(), max_size=40), end=st.floats(0, 600, allow_nan=False))
def test_buckets_sum_to_wall_whatever_happens(history: list[EventRow], end: float) -> None:
    found = goodput(BEGIN, history, BEGIN + end)
    values = found.buckets.model_dump()
    assert all(value >= 0 for value in values.values())
    # Exactly, in the ledger's unit; the floats of the answer are that divided by a million.
    assert (
        sum(to_us(value) for value in values.values())
        == to_us(found.wall_s)
        == to_us(BEGIN + end) - to_us(BEGIN)
    )
    assert found.goodput is None or 0 <= found.goodput <= 1


@given(history=st.lists(any_event(), max_size=40), cut=st.integers(0, 40))
def test_a_ledger_that_is_stored_in_between_says_the_same(
    history: list[EventRow], cut: int
) -> None:
    whole, parts = TimeLedger.begin(BEGIN), TimeLedger.begin(BEGIN)
    for index, item in enumerate(history):
        whole.apply(item, BEGIN + 600)
        if index == cut:
            parts = TimeLedger.load(parts.dump())
        parts.apply(item, BEGIN + 600)
    assert parts.close(BEGIN + 600) == whole.close(BEGIN + 600)
    assert set(whole.spent_us) <= set(BUCKETS)


@given(
    history=st.lists(any_event(), max_size=40),
    heard_s=st.lists(st.floats(0, 600, allow_nan=False), min_size=40, max_size=40),
    end=st.floats(600, 700, allow_nan=False),
)
def test_outages_and_clocks_that_disagree_lose_and_invent_no_time(
    history: list[EventRow], heard_s: list[float], end: float
) -> None:
    """Events are heard of in batches, minutes late, by a service whose clock is not that of the
    nodes."""
    ledger = TimeLedger.begin(BEGIN)
    for item, heard in zip(history, sorted(heard_s), strict=False):
        before = ledger.close(BEGIN + heard)
        ledger.apply(item, BEGIN + heard)
        assert ledger.at_us <= to_us(BEGIN + heard), "no time is booked that has not been"
        assert ledger.close(BEGIN + heard).wall_s == before.wall_s
    found = ledger.close(BEGIN + end)
    assert sum(to_us(value) for value in found.buckets.model_dump().values()) == to_us(
        BEGIN + end
    ) - to_us(BEGIN)


def test_two_minutes_without_the_service_and_a_node_30_s_ahead() -> None:
    ledger = TimeLedger.begin(BEGIN)
    ledger.apply(status(0, RunStatus.STARTING), BEGIN)
    # happened at 10 by the service's clock
    ledger.apply(event(EventKind.TRAINING_STARTED, 40), BEGIN + 10)
    for item in (
        steps(*((step, 41 + step) for step in range(1, 120))),
        event(EventKind.FAILURE, 161, detect_s=1.0),
    ):
        ledger.apply(item, BEGIN + 130)  # heard of when the service was back
    found = ledger.close(BEGIN + 140).buckets
    assert (found.starting, found.productive, found.detecting, found.restarting) == (10, 119, 1, 10)


def test_a_failure_interrupts_what_came_after_an_evaluation_and_a_hook_not_these() -> None:
    history = [
        status(0, RunStatus.STARTING),
        event(EventKind.TRAINING_STARTED, 1),
        steps((1, 2), (2, 3)),
        event(EventKind.EVALUATED, 103, step=2, epoch=0, metrics={}),
        event(EventKind.EPOCH_HOOK_DONE, 203, epoch=0, seconds=100.0),
        event(EventKind.FAILURE, 213, verdict="hang", detect_s=None),
    ]
    assert buckets(history, 220) == {
        "starting": 1,
        "productive": 202,
        "detecting": 10,
        "restarting": 7,
    }
    assert buckets([*history[:4], history[5]], 220)["detecting"] == 110, (
        "of a hook that never returned nothing is known"
    )
