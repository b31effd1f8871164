"""What benchmarks make of their turns: which steps count, and what a ratio is of; and what never
began is no figure."""

from __future__ import annotations

import random

import pytest

from benchmarks import recovery
from benchmarks.by_turns import BLOCK, ORDER, SETTLING, Kind, Turn
from benchmarks.steady import NUM_KINDS, quiet_steps, results_of, rounds_of, settled_steps


def make_turn(kind: Kind, step_s: float, slow: dict[int, set[int]] | None = None) -> Turn:
    """``slow``: before which steps which rank's work takes twice as long; steps beside that take
    twice as long, too."""
    works_s = [
        [0.002 if at in (slow or {}).get(rank, ()) else 0.001 for at in range(BLOCK + 1)]
        for rank in range(2)
    ]
    steps_s = [
        step_s * max(works[at] + works[at + 1] for works in works_s) / 0.002 for at in range(BLOCK)
    ]
    return Turn(kind, steps_s, works_s)


def test_steps_beside_slow_work_of_any_rank_are_not_quiet() -> None:
    turns = [make_turn("protected", 1.0, {0: {30}, 1: {50, 51, BLOCK}}), make_turn("plain", 1.0)]
    of = quiet_steps(turns)
    lost = {29, 30, 49, 50, 51, BLOCK - 1}
    assert len(of(turns[0])) == BLOCK - SETTLING - len(lost) and set(of(turns[0])) == {1.0}
    assert len(of(turns[1])) == len(settled_steps(turns[1])) == BLOCK - SETTLING


def test_a_core_that_is_always_slower_than_the_other_is_quiet() -> None:
    turn = make_turn("plain", 1.0)
    slower = Turn("plain", turn.steps_s, [turn.works_s[0], [2 * work for work in turn.works_s[1]]])
    assert len(quiet_steps([slower])(slower)) == BLOCK - SETTLING


def test_quiet_steps_tell_what_a_noisy_machine_hides() -> None:
    """Steps that are 1 % longer, on cores that are half as fast for a third of the time."""
    chance = random.Random(3)
    turns = []
    for number in range(20 * NUM_KINDS):
        kind = ORDER[number % len(ORDER)]
        slow = {rank: {at for at in range(BLOCK + 1) if chance.random() < 0.2} for rank in range(2)}
        turns.append(make_turn(kind, 0.02525 if kind == "protected" else 0.025, slow))
    quiet = results_of(rounds_of(turns, quiet_steps(turns)))
    assert quiet["rounds"] == 19, "the first one does not count"
    assert (
        quiet["ratio_of_means"]["mean"] == pytest.approx(1.01)
        and quiet["ratio_of_means"]["standard_error"] < 1e-6
    )
    assert results_of(rounds_of(turns, settled_steps))["ratio_of_means"]["standard_error"] > 1e-3


def test_a_side_that_does_not_start_has_no_time_of_recovery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "GIVE_UP_S", 0.0)
    with pytest.raises(TimeoutError, match="the rendezvous"):
        recovery.measure("torchrun", "digits", "node", cold=False)
