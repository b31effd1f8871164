"""When a checkpoint is due, and the interval that ``auto`` chooses."""

from __future__ import annotations

from typing import Any

from everstep.spec.sections import CheckpointSpec
from train_fn.checkpoints.cadence import SaveCadence


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


def test_auto_writes_for_a_twentieth_of_the_time_within_bounds() -> None:
    clock = cadence(every_steps="auto")
    assert not clock.is_due(5, 104.9) and clock.is_due(5, 105.0), "how long it takes is not known"
    for write_s, interval_s in ((2.0, 40.0), (0.001, 5.0), (600.0, 1800.0)):
        clock.begun(5, 200.0)
        clock.committed(write_s)
        assert not clock.is_due(6, 199.9 + interval_s) and clock.is_due(6, 200.0 + interval_s)
