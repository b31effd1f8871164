"""Parity of the loss around a recovery: each condition broken once."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.wire.drills import DrillParity
from everstep.wire.events import EventKind
from service.annexes.drills.history import parity
from service.model.rows import EventRow

FALLING = {step: 2.0 - 0.01 * step for step in range(1, 60)}


def metrics(attempt: int, losses: Mapping[int, float | None]) -> EventRow:
    points = [{"step": step, "at": 1.0, "values": {"loss": loss}} for step, loss in losses.items()]
    return EventRow(1, 1.0, EventKind.METRICS, 1, attempt, {"points": points})


def compared(
    *events: EventRow,
    step: int = 30,
    sizes: tuple[int, int] = (2, 2),
    over: bool = False,
    once: bool | None = None,
) -> DrillParity:
    data = {"world_size_before": sizes[0], "world_size_after": sizes[1]}
    return parity(
        events,
        EventRow(9, 1.0, EventKind.RECOVERED, 1, 2, data),
        step,
        over=over,
        samples_used_once=once,
    )


def steps(first: int, last: int, add: float = 0.0, times: float = 1.0) -> dict[int, float | None]:
    return {step: FALLING[step] * times + add for step in range(first, last + 1)}


BEFORE = metrics(1, steps(1, 30))


def test_a_loss_that_goes_on_is_in_parity() -> None:
    found = compared(BEFORE, metrics(2, steps(31, 50)))
    assert found.in_parity is True and found.num_steps_after == 10
    assert (
        found.loss_before is not None
        and found.loss_after is not None
        and found.loss_after < found.loss_before
    )


def test_it_is_not_known_before_ten_steps_unless_no_more_come() -> None:
    assert compared(BEFORE, metrics(2, steps(31, 39))).in_parity is None
    assert compared(BEFORE, metrics(2, steps(31, 39)), over=True).in_parity is True
    assert compared(BEFORE, over=True).in_parity is False, "it never trained a step"


def test_a_gap_is_named() -> None:
    found = compared(BEFORE, metrics(2, steps(32, 50)))
    assert found.in_parity is False and found.missing_steps == (31,)
    inside = compared(metrics(1, {**steps(1, 24), **steps(26, 30)}), metrics(2, steps(31, 50)))
    assert inside.in_parity is False and inside.missing_steps == (25,)


def test_a_step_that_was_repeated_must_have_the_same_loss() -> None:
    repeated = compared(BEFORE, metrics(2, steps(21, 50)), step=20)
    assert repeated.in_parity is True and repeated.loss_before is not None
    other = compared(BEFORE, metrics(2, steps(21, 50, times=1.005)), step=20)
    assert other.in_parity is False and other.conflicting_steps == tuple(range(21, 31))
    assert (
        compared(BEFORE, metrics(2, steps(21, 50, times=1.005)), step=20, sizes=(2, 1)).in_parity
        is True
    )
    reported_again = compared(BEFORE, metrics(2, {**steps(28, 30, add=0.1), **steps(31, 50)}))
    assert reported_again.conflicting_steps == (28, 29, 30)
    assert compared(BEFORE, metrics(2, {30: None, **steps(31, 50)})).conflicting_steps == (30,)


def test_a_loss_that_jumps_is_out_of_the_trend() -> None:
    jumped = compared(BEFORE, metrics(2, steps(31, 50, add=1.0)))
    assert jumped.in_parity is False and jumped.missing_steps == jumped.conflicting_steps == ()
    assert compared(BEFORE, metrics(2, {**steps(31, 50), 33: None})).in_parity is False
    assert compared(BEFORE, metrics(2, steps(31, 50, add=-1.0))).in_parity is True


def test_the_sample_ledger_decides_too() -> None:
    after = metrics(2, steps(31, 50))
    assert compared(BEFORE, after, once=True).in_parity is True
    assert compared(BEFORE, after, once=False).in_parity is False


def test_a_fault_in_the_first_step_leaves_nothing_to_compare_with() -> None:
    found = compared(metrics(1, {}), metrics(2, steps(1, 20)), step=0)
    assert found.in_parity is True and found.loss_before is None
