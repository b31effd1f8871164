"""What ranks say of a step: it adds up to what each of them said, and every difference is found."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_fn.protect.agreement import MOST_VALUES, Word, decoded, encoded
from train_fn.protect.loop_state import numbers_of, received, sent
from train_fn.samples.ledger import Count

STEPS = st.integers(0, (1 << 32) - 1)
UPDATES = st.integers(0, (1 << 30) - 1)
COUNTS = st.builds(
    Count, st.integers(0, 1 << 40), st.just(0), st.just(0), st.integers(0, (1 << 64) - 1)
)


def summed(words: list[Word]) -> list[int]:
    rows = [encoded(word, rank, len(words)) for rank, word in enumerate(words)]
    sums = [sum(column) for column in zip(*rows, strict=True)]
    assert all(-(1 << 63) <= each < 1 << 63 for each in sums)
    return sums


@given(STEPS, UPDATES, st.lists(COUNTS, min_size=1, max_size=5))
def test_ranks_of_one_step_agree_on_their_samples(
    step: int, num_updates: int, counts: list[Count]
) -> None:
    words = [Word(step, num_updates, None, count) for count in counts]
    agreed = decoded(summed(words))
    whole = Count()
    for count in counts:
        whole = whole + count
    assert [agreed.fault(word, whole) for word in words] == [None] * len(words)
    assert agreed.sample_hash == whole.sample_hash and agreed.stop is None
    other = Count(whole.num_samples, 0, 0, whole.sample_hash ^ 1)
    assert "samples" in str(agreed.fault(words[0], other))


@given(st.lists(st.tuples(STEPS, UPDATES), min_size=2, max_size=5))
def test_every_rank_finds_a_rank_that_differs(places: list[tuple[int, int]]) -> None:
    words = [Word(*place) for place in places]
    agreed = decoded(summed(words))
    assert agreed.places == tuple(places)
    for word in words:
        assert (agreed.fault(word, None) is None) == (len(set(places)) == 1)


def test_every_rank_learns_of_every_rank_s_batch() -> None:
    words = [Word(3, 3, batch=mark) for mark in (5, (1 << 60) - 1, 0)]
    assert decoded(summed(words)).batches == (5, (1 << 60) - 1, 0)


def test_a_rank_that_has_left_its_loop_is_found() -> None:
    words = [Word(7, 7), Word(7, 7, has_ended=True)]
    agreed = decoded(summed(words))
    assert all(agreed.fault(word, None) for word in words)
    both = [Word(7, 7, has_ended=True)] * 2
    assert decoded(summed(both)).fault(both[0], None) is None


@pytest.mark.parametrize("stop", ["pause", "cancel"])
def test_a_stop_that_one_rank_heard_of_is_for_all(stop: str) -> None:
    words = [Word(7, 7), Word(7, 7, stop)]  # type: ignore[arg-type]
    assert decoded(summed(words)).stop == stop
    assert decoded(summed([*words, Word(7, 7, "cancel")])).stop == "cancel"


@given(st.dictionaries(st.text(max_size=9), st.floats(), max_size=MOST_VALUES + 3))
def test_all_ranks_report_what_rank_0_measured(metrics: dict[str, float]) -> None:
    mine = numbers_of(metrics)
    hashed, values = sent(mine)
    agreed = decoded(summed([Word(1, 1, values=values, names_hash=hashed), Word(1, 1)]))
    other = dict.fromkeys(mine, 0.5)
    found = received(other, agreed.names_hash, agreed.values)
    assert found == {name: mine[name] for name in sorted(mine)[:MOST_VALUES]}
    assert all(value is None or math.isfinite(value) for value in found.values())
    assert received({**other, "another": 1.0}, agreed.names_hash, agreed.values)["another"] == 1.0
