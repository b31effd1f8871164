"""Which state an attempt goes on from: the newest that can be trusted, and the same choice on every rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from train_fn.election import Offer, elect
from train_fn.snapshot import Label

SUBMISSION = 3


def offer(
    rank: int, step: int, digest: str = "a", attempt: int = 1, submission: int = SUBMISSION, problem: str | None = None
) -> Offer:
    return Offer(rank, Label(submission, attempt, step, rank, None if problem else digest, problem))


def test_the_newest_wins_and_the_lowest_rank_that_has_it_is_the_source() -> None:
    offers = [offer(0, 9), offer(2, 10), offer(1, 10)]
    assert elect(offers, SUBMISSION).offer == offers[2]
    assert elect(offers, SUBMISSION).rejected == ()


def test_survivors_that_contradict_each_other_are_not_trusted() -> None:
    elected = elect([offer(0, 10, "a"), offer(1, 10, "b"), offer(2, 9, "c")], SUBMISSION)
    assert elected.offer == offer(2, 9, "c")
    assert len(elected.rejected) == 2
    assert all("differs" in rejection.problem for rejection in elected.rejected)


def test_a_later_attempt_that_reached_the_same_step_is_believed() -> None:
    elected = elect([offer(0, 10, "a", attempt=1), offer(1, 10, "b", attempt=2)], SUBMISSION)
    assert elected.offer is not None
    assert elected.offer.label.attempt == 2


def test_other_submissions_do_not_count() -> None:
    assert elect([offer(0, 99, submission=2), offer(1, 99, submission=4)], SUBMISSION).offer is None


def test_a_rank_that_could_leave_nothing_is_reported() -> None:
    elected = elect([offer(0, 10, problem="too little room"), offer(1, 9)], SUBMISSION)
    assert elected.offer == offer(1, 9)
    assert [rejection.problem for rejection in elected.rejected] == ["too little room"]


OFFERS = st.lists(
    st.builds(
        offer,
        rank=st.integers(0, 5),
        step=st.integers(0, 3),
        digest=st.sampled_from("ab"),
        attempt=st.integers(1, 3),
        submission=st.integers(2, 4),
        problem=st.sampled_from([None, None, None, "full"]),
    ),
    max_size=12,
)


@given(OFFERS, st.randoms())
def test_any_history_elects_a_state_that_nothing_newer_or_equal_contradicts(offers: list[Offer], order: object) -> None:
    elected = elect(offers, SUBMISSION)
    shuffled = list(offers)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert elect(shuffled, SUBMISSION).offer == elected.offer  # ranks may hear in any order
    usable = [found.label for found in offers if found.label.submission == SUBMISSION and not found.label.problem]
    if elected.offer is None:
        for label in usable:
            assert any(
                other.digest != label.digest and (other.step, other.attempt) == (label.step, label.attempt) for other in usable
            )
        return
    chosen = elected.offer.label
    assert chosen in usable
    for label in usable:
        if (label.step, label.attempt) == (chosen.step, chosen.attempt):
            assert label.digest == chosen.digest
        elif (label.step, label.attempt) > (chosen.step, chosen.attempt):
            assert any(
                other.digest != label.digest and (other.step, other.attempt) == (label.step, label.attempt) for other in usable
            )
