"""What ranks say of a commit: it arrives as it was said, and every difference is found."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_fn.protect.commits import difference
from train_fn.protect.loop_state import MOST_VALUES, numbers_of, received, sent
from train_fn.samples.ledger import Count
from train_fn.step.report import ReportRows, StepReport, Votes, stop_of

STEPS = st.integers(0, 1 << 40)
COUNTS = st.builds(
    Count, st.integers(0, 1 << 40), st.just(0), st.just(0), st.integers(0, (1 << 64) - 1)
)


def arrived(said: list[StepReport]) -> list[StepReport | None]:
    rows = ReportRows(MOST_VALUES)
    return [rows.decode(rows.encode(each)) for each in said]


@given(STEPS, STEPS, st.lists(COUNTS, min_size=1, max_size=5))
def test_ranks_of_one_step_agree_on_their_samples(
    step: int, num_updates: int, counts: list[Count]
) -> None:
    said = [StepReport(step, count, num_updates=num_updates) for count in counts]
    whole = sum(counts, Count())
    assert [difference(each, arrived(said), whole) for each in said] == [None] * len(said)
    other = Count(whole.num_samples, 0, 0, whole.sample_hash ^ 1)
    assert "samples" in str(difference(said[0], arrived(said), other))


@given(st.lists(st.tuples(STEPS, STEPS), min_size=2, max_size=5))
def test_every_rank_finds_a_rank_that_differs(places: list[tuple[int, int]]) -> None:
    said = [StepReport(step, num_updates=num_updates) for step, num_updates in places]
    for each in said:
        assert (difference(each, arrived(said), None) is None) == (len(set(places)) == 1)


def test_a_rank_of_which_nothing_has_arrived_is_found() -> None:
    said = StepReport(3, num_updates=3)
    assert difference(said, [said, None], None) == "rank 1 said nothing of step 3"


def test_a_rank_that_has_left_its_loop_is_found() -> None:
    said = [StepReport(7), StepReport(7, has_ended=True)]
    assert all(difference(each, arrived(said), None) for each in said)
    both = [StepReport(7, has_ended=True)] * 2
    assert difference(both[0], arrived(both), None) is None


@pytest.mark.parametrize("stop", ["pause", "cancel"])
def test_a_stop_that_one_rank_heard_of_is_for_all(stop: Any) -> None:
    said = [StepReport(7), StepReport(7, votes=Votes(stop))]
    assert stop_of(said) == stop
    assert stop_of([*said, StepReport(7, votes=Votes("cancel"))]) == "cancel"


@given(st.dictionaries(st.text(max_size=9), st.floats(), max_size=MOST_VALUES + 3))
def test_all_ranks_report_what_rank_0_measured(metrics: dict[str, float]) -> None:
    mine = numbers_of(metrics)
    hashed, values = sent(mine)
    [first] = arrived([StepReport(1, numbers=values, names_hash=hashed)])
    assert first is not None
    other = dict.fromkeys(mine, 0.5)
    found = received(other, first.names_hash, first.numbers)
    assert found == {name: mine[name] for name in sorted(mine)[:MOST_VALUES]}
    assert all(value is None or math.isfinite(value) for value in found.values())
    assert received({**other, "another": 1.0}, first.names_hash, first.numbers)["another"] == 1.0
