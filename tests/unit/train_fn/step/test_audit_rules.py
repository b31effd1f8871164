"""Which steps are audited, by whom, and who is named: pure functions that all ranks evaluate
alike."""

from __future__ import annotations

import pytest

from train_fn.step.fingerprints import (
    Computed,
    Dispute,
    audited_place,
    audited_rank,
    is_audited,
    settled,
)

SEED = 7


def test_the_schedule_hits_the_share_that_was_asked_for_and_depends_on_the_seed() -> None:
    steps = range(20_000)
    for fraction in (0.001, 0.1, 0.5):
        found = sum(is_audited(SEED, step, fraction) for step in steps)
        assert abs(found / len(steps) - fraction) < 4 * (fraction / len(steps)) ** 0.5
    assert all(is_audited(SEED, step, 1.0) for step in steps[:1000])
    assert not any(is_audited(SEED, step, 0.0) for step in steps[:1000])
    one, other = ([is_audited(seed, step, 0.5) for step in steps[:100]] for seed in (1, 2))
    assert one != other


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_rank_audits_another_one_and_in_time_each_of_them(world_size: int) -> None:
    seen = set()
    for step in range(200):
        audited = [audited_rank(SEED, step, rank, world_size) for rank in range(world_size)]
        assert sorted(audited) == list(range(world_size)), "each rank is audited once"
        seen |= {(rank, of) for rank, of in enumerate(audited)}
    assert len(seen) == world_size * (world_size - 1), "and never by itself"


def test_a_rank_alone_audits_itself_and_each_place_of_a_share_has_its_turn() -> None:
    assert audited_rank(SEED, 3, 0, 1) == 0
    assert {audited_place(SEED, step, 1, 4) for step in range(100)} == {0, 1, 2, 3}


def computed(gradient: int) -> Computed:
    return Computed(1, "0x1p+0 0x1p+0", gradient, 2)


RIGHT, WRONG, OTHER, THIRD = 10, 11, 12, 13


@pytest.mark.parametrize(
    ("own", "audited", "again", "named"),
    [
        pytest.param(WRONG, RIGHT, [RIGHT, RIGHT, RIGHT], (0,), id="owner, once"),
        pytest.param(WRONG, RIGHT, [WRONG, RIGHT, RIGHT], (0,), id="owner, always"),
        pytest.param(RIGHT, WRONG, [RIGHT, WRONG, RIGHT], (1,), id="auditor, always"),
        pytest.param(WRONG, RIGHT, [OTHER, RIGHT, RIGHT], (0,), id="owner, each time otherwise"),
        pytest.param(WRONG, RIGHT, [RIGHT, RIGHT, WRONG], (0, 2), id="two ranks"),
        pytest.param(WRONG, RIGHT, [RIGHT, RIGHT], (0,), id="of two ranks, once"),
        pytest.param(RIGHT, WRONG, [RIGHT, RIGHT], (1,), id="the auditor of two, once"),
        pytest.param(WRONG, RIGHT, [WRONG, RIGHT], (), id="of two ranks, always"),
        pytest.param(WRONG, RIGHT, [OTHER, THIRD], (), id="all differ"),
        pytest.param(WRONG, RIGHT, [OTHER, THIRD, RIGHT], (), id="no majority of three"),
        pytest.param(WRONG, RIGHT, [WRONG, WRONG, RIGHT, RIGHT], (), id="two against two"),
    ],
)
def test_most_ranks_decide(own: int, audited: int, again: list[int], named: tuple[int]) -> None:
    dispute = Dispute(4, 0, 1, computed(own), computed(audited))
    assert settled(dispute, [computed(each) for each in again]) == named


@pytest.mark.parametrize(("again", "named"), [(RIGHT, (0,)), (WRONG, (0,)), (OTHER, ())])
def test_a_rank_alone_is_named_if_two_of_its_three_results_agree(
    again: int, named: tuple[int]
) -> None:
    dispute = Dispute(4, 0, 0, computed(WRONG), computed(RIGHT))
    assert settled(dispute, [computed(again)]) == named
