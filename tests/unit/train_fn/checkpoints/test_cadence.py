"""When a checkpoint is due, and the interval that ``auto`` chooses."""

from __future__ import annotations

import math
from typing import Any

import pytest

from everstep.spec.sections import CheckpointSpec
from train_fn.checkpoints.cadence import (
    ASSUMED_MTBF_S,
    ObservedFailures,
    SaveCadence,
    choose_interval,
    young_daly_s,
)


def cadence(**checkpoint: Any) -> SaveCadence:
    return SaveCadence(CheckpointSpec(**checkpoint), step=0, now=100.0)


def test_by_steps_and_what_came_due_while_it_could_not_be_done_stays_due() -> None:
    clock = SaveCadence(CheckpointSpec(every_steps=10), step=57, now=0.0)
    assert [step for step in range(57, 75) if clock.is_due(step, 0.0)] == list(range(60, 75))
    clock.begun(63, 0.0)
    assert [step for step in range(63, 75) if clock.is_due(step, 0.0)] == list(range(70, 75)), (
        "the grid stays where it was"
    )


def test_by_time_whichever_comes_first_and_never_the_same_step_twice() -> None:
    clock = cadence(every_steps=1000, every_s=5.0)
    assert not clock.is_due(0, 1e9), "that state is there already"
    assert not clock.is_due(3, 104.9) and clock.is_due(3, 105.0)
    clock.begun(3, 105.0)
    assert not clock.is_due(4, 109.9) and clock.is_due(1000, 105.1)
    assert not cadence(every_steps=None).is_due(10**6, 1e9), "only at the end"


@pytest.mark.parametrize(
    ("cost_s", "mtbf_s"), [(0.01, 3600.0), (5.0, 3600.0), (60.0, 600.0), (300.0, 600.0)]
)
def test_young_and_daly_lose_the_least(cost_s: float, mtbf_s: float) -> None:
    """Against the exact expectation for exponential failures: seconds that a second of useful work
    takes."""

    def expected(interval_s: float) -> float:
        return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s

    chosen = young_daly_s(cost_s, mtbf_s)
    best = min(expected(chosen * factor / 100) for factor in range(20, 500))
    assert expected(chosen) <= best * 1.005
    assert young_daly_s(2000.0, 600.0) == 600.0, (
        "a save that costs more than two failures apart is not worth more"
    )


def test_the_choice_keeps_to_its_bounds_and_says_why() -> None:
    seen = ObservedFailures(num_failures=3, trained_s=4 * 600.0 - ASSUMED_MTBF_S)
    free = choose_interval(CheckpointSpec(every_steps="auto"), 0.5, 1.0, seen)
    assert (
        free.mtbf_s == 600.0 and free.interval_s == young_daly_s(0.5, 600.0) and free.bound is None
    )
    assert "after 3 failures" in free.reason() and "every 24" in free.reason()
    slow = choose_interval(CheckpointSpec(every_steps="auto"), 0.5, 100.0, seen)
    assert (slow.interval_s, slow.bound) == (
        100.0,
        "write",
    ) and "writing takes 100 s" in slow.reason()
    cheap = choose_interval(CheckpointSpec(every_steps="auto", min_interval_s=30), 1e-6, 1.0, seen)
    assert (cheap.interval_s, cheap.bound) == (30.0, "min_interval_s")
    dear = choose_interval(
        CheckpointSpec(every_steps="auto", mtbf_s=1e7), 20.0, 1.0, ObservedFailures()
    )
    assert (dear.interval_s, dear.bound, dear.source) == (
        1800.0,
        "max_interval_s",
        "given",
    ) and "as given" in dear.reason()


def run_steps(clock: SaveCadence, now: float, seconds: list[float], busy: bool) -> float:
    for step_s in seconds:
        clock.boundary_left(now)
        now += step_s
        clock.step_ended(now, busy=busy)
    return now


def test_auto_saves_early_for_a_price_then_by_it_and_tells_only_news() -> None:
    clock = cadence(every_steps="auto", mtbf_s=3600.0, min_interval_s=2.0)
    assert not clock.is_due(5, 101.9) and clock.is_due(5, 102.0)
    now = run_steps(clock, 102.0, [0.1] * 10, busy=False)
    clock.begun(15, now)
    first = clock.committed(0.01, 0.5, ObservedFailures())
    assert first is not None and first["cost_s"] == 0.01 and first["mtbf_source"] == "given"
    assert first["interval_s"] == round(young_daly_s(0.01, 3600.0), 3) and first["reason"]
    assert not clock.is_due(20, now + first["interval_s"] - 0.01) and clock.is_due(
        20, now + first["interval_s"] + 0.01
    )

    # the last one with an evaluation in it
    now = run_steps(clock, now, [0.15] * 4 + [30.0], busy=True)
    clock.begun(20, now)
    second = clock.committed(0.01, 0.5, ObservedFailures())
    assert second is not None and second["slowdown_s"] == pytest.approx(5 * 0.05)
    assert second["cost_s"] == pytest.approx(0.26)

    now = run_steps(clock, now, [0.15] * 5, busy=True)
    clock.begun(25, now)
    assert clock.committed(0.011, 0.5, ObservedFailures()) is None, "much the same again"
