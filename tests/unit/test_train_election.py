"""Which state an attempt goes on from: the newest that can be trusted, and the same choice on every rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from train_fn.election import Offer, elect, in_lineage
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


# ---------------------------------------------------------------- over several attempts


def test_an_attempt_that_died_before_it_published_leaves_the_snapshot_that_it_began_from() -> None:
    offers = [offer(0, 56), offer(0, 57)]
    standing, rejected = in_lineage(offers, {1: 0, 2: 57})
    assert (standing, rejected) == (offers, ())
    assert elect(standing, SUBMISSION).offer == offers[1]


def test_a_snapshot_that_a_later_attempt_had_to_do_without_is_no_part_of_the_run() -> None:
    met_again, published = offer(0, 57), offer(1, 53, attempt=2)
    standing, rejected = in_lineage([met_again, published], {1: 0, 2: 50})
    assert standing == [published]
    [rejection] = rejected
    assert (rejection.name, rejection.problem) == (
        "snapshot of step 57 by rank 0 of attempt 1",
        "a later attempt went on from step 50",
    )


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.booleans()), min_size=1, max_size=8))
def test_whatever_attempts_die_and_see_the_lineage_is_one_chain(history: list[tuple[int, bool, bool]]) -> None:
    """Each attempt trains some steps, publishes its last one or not, and its node is there or not when the next one begins."""
    chain: dict[int, int] = {}  # step -> attempt that took it, in the run as it went
    starts: dict[int, int] = {}
    offers: list[Offer] = []
    away: list[Offer] = []
    for attempt, (num_steps, publishes, stays) in enumerate(history, start=1):
        elected = elect(in_lineage(offers, starts)[0], SUBMISSION).offer
        step = elected.label.step if elected else 0
        if elected:
            assert chain[step] == elected.label.attempt, "a state that the run did not go through"
        chain = {done: by for done, by in chain.items() if done <= step}
        starts[attempt] = step
        chain |= dict.fromkeys(range(step + 1, step + num_steps + 1), attempt)
        mine = [offer(0, step + num_steps, attempt=attempt)] if publishes else []
        offers, away = (offers + away + mine, []) if stays else (offers, away + mine)


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
