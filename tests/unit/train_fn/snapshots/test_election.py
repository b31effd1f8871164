"""Which state an attempt goes on from: the newest that can be trusted, and the same choice on every
rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.checkpoints.reader import RestorePoint
from train_fn.snapshots.election import Candidate, elect, in_lineage, odd_ranks
from train_fn.snapshots.store import Label, Origin

SUBMISSION = 3


def candidate(
    rank: int,
    step: int,
    digest: str = "a",
    attempt: int = 1,
    submission: int = SUBMISSION,
    problem: str | None = None,
) -> Candidate:
    return Candidate(
        rank, Label(submission, attempt, step, rank, None if problem else digest, problem)
    )


def test_the_newest_wins_and_the_lowest_rank_that_has_it_is_the_source() -> None:
    candidates = [candidate(0, 9), candidate(2, 10), candidate(1, 10)]
    assert elect(candidates, SUBMISSION).candidate == candidates[2]
    assert elect(candidates, SUBMISSION).rejected == ()


def test_survivors_that_contradict_each_other_are_not_trusted() -> None:
    elected = elect(
        [candidate(0, 10, "a"), candidate(1, 10, "b"), candidate(2, 9, "c")], SUBMISSION
    )
    assert elected.candidate == candidate(2, 9, "c")
    assert len(elected.rejected) == 2
    assert all("differs" in rejection.problem for rejection in elected.rejected)


def test_a_rank_that_could_leave_nothing_is_reported() -> None:
    elected = elect([candidate(0, 10, problem="too little room"), candidate(1, 9)], SUBMISSION)
    assert elected.candidate == candidate(1, 9)
    assert [rejection.problem for rejection in elected.rejected] == ["too little room"]


def piece(rank: int, digest: str, of: int, held_by: int | None = None) -> Candidate:
    found = candidate(rank, 10, digest)
    return Candidate(rank if held_by is None else held_by, replace(found.label, pieces=of))


def test_a_state_in_pieces_counts_if_one_of_each_is_there() -> None:
    older = candidate(0, 9)
    assert elect([piece(0, "a", 2), older], SUBMISSION).candidate == older
    assert elect([piece(0, "a", 2), piece(1, "b", 2)], SUBMISSION).candidate == piece(0, "a", 2)
    replicas = [piece(2, "c", 2), piece(1, "b", 2)]
    assert elect([*replicas, older], SUBMISSION).candidate == piece(1, "b", 2)
    assert elect([piece(1, "b", 2), piece(3, "d", 2), older], SUBMISSION).candidate == older


def test_two_files_of_one_rank_s_piece_that_differ_are_not_trusted() -> None:
    copies = [piece(0, "a", 2), piece(0, "x", 2, held_by=1), piece(1, "b", 2)]
    elected = elect([*copies, candidate(0, 9)], SUBMISSION)
    assert elected.candidate == candidate(0, 9) and len(elected.rejected) == 2
    # Another replica has the same piece, and nothing is wrong with that one.
    assert elect([*copies, piece(2, "c", 2)], SUBMISSION).candidate == piece(1, "b", 2)


@pytest.mark.parametrize(
    ("of_ranks", "of", "expected"),
    [
        ("aab", 1, (2,)),
        ("ab", 1, ()),
        ("aaa", 1, ()),
        ("xyxyxz", 2, (5,)),
        ("xyzyxy", 2, (2,)),
        ("xyzyzw", 2, (0, 5)),
        ("xyzy", 2, ()),  # nothing shows which of two replicas is wrong
        ("abc", 3, ()),
    ],
)
def test_the_ranks_that_differ_from_most_are_named(
    of_ranks: str, of: int, expected: tuple[int, ...]
) -> None:
    assert odd_ranks(of_ranks, of) == expected


# ---------------------------------------------------------------- over several attempts


def went_on(**starts: int) -> dict[Origin, RestorePoint]:
    """Of this submission: where each attempt began, ``a2=57``."""
    return {
        (SUBMISSION, int(name[1:])): RestorePoint(step, fresh=False)
        for name, step in starts.items()
    }


def test_a_snapshot_that_a_later_attempt_had_to_do_without_is_no_part_of_the_run() -> None:
    met_again, published = candidate(0, 57), candidate(1, 53, attempt=2)
    standing, rejected = in_lineage([met_again, published], went_on(a1=0, a2=50))
    assert standing == [published]
    [rejection] = rejected
    assert (rejection.name, rejection.problem) == (
        "snapshot of step 57 by rank 0 of attempt 1",
        "a later attempt went on from step 50",
    )


def test_whoever_began_anew_lets_nothing_stand() -> None:
    met_again = candidate(0, 0, submission=2)
    standing, [rejection] = in_lineage([met_again], {(SUBMISSION, 2): RestorePoint(0, fresh=True)})
    assert (standing, rejection.problem) == ([], "a later attempt began anew")


CANDIDATES = st.lists(
    st.builds(
        candidate,
        rank=st.integers(0, 5),
        step=st.integers(0, 3),
        digest=st.sampled_from("ab"),
        attempt=st.integers(1, 3),
        submission=st.integers(2, 4),
        problem=st.sampled_from([None, None, None, "full"]),
    ),
    max_size=12,
)


@given(CANDIDATES, st.randoms())
def test_any_history_elects_a_state_that_nothing_newer_or_equal_contradicts(
    candidates: list[Candidate], order: object
) -> None:
    elected = elect(candidates, SUBMISSION)
    shuffled = list(candidates)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert elect(shuffled, SUBMISSION).candidate == elected.candidate  # ranks may hear in any order
    usable = [
        found.label
        for found in candidates
        if found.label.submission <= SUBMISSION and not found.label.problem
    ]
    if elected.candidate is None:
        for label in usable:
            assert any(
                other.digest != label.digest
                and (other.step, other.origin) == (label.step, label.origin)
                for other in usable
            )
        return
    chosen = elected.candidate.label
    assert chosen in usable
    for label in usable:
        if (label.step, label.origin) == (chosen.step, chosen.origin):
            assert label.digest == chosen.digest
        elif (label.step, label.origin) > (chosen.step, chosen.origin):
            assert any(
                other.digest != label.digest
                and (other.step, other.origin) == (label.step, label.origin)
                for other in usable
            )
