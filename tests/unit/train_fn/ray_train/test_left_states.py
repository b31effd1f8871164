"""Where the newest state is looked for before a group begins, and what is brought to its nodes."""

from __future__ import annotations

import pytest

from train_fn.ray_train.group.left_states import may_lie_elsewhere, pieces_to_bring
from train_fn.snapshots.election import Candidate
from train_fn.snapshots.store import Label


@pytest.mark.parametrize(
    ("kept", "ending", "done", "in_pieces", "expected"),
    [
        ([], [123], 123, False, True),  # the only survivor is on a node without a rank
        ([], [], 123, False, True),  # all have died, and one of them had published
        ([122], [123], 122, False, True),  # a survivor may be a step ahead
        ([123], [123], 123, False, False),
        ([124], [], 123, False, False),  # the journal lags behind
        ([123], [], 123, True, True),  # no node has all pieces
        ([], [], 0, True, False),  # nothing was trained yet
    ],
)
def test_a_state_is_looked_for_elsewhere_if_no_host_of_the_group_has_the_newest(
    kept: list[int], ending: list[int], done: int, in_pieces: bool, expected: bool
) -> None:
    assert may_lie_elsewhere(kept, ending, done, in_pieces=in_pieces) is expected


def candidate(at: int, step: int, rank: int = 0, pieces: int = 1) -> Candidate:
    return Candidate(at, Label(1, 1, step, rank, f"{step}-{rank % pieces}", None, pieces=pieces))


@pytest.mark.parametrize(
    ("candidates", "brought"),
    [
        ([candidate(2, 123), candidate(3, 123)], [candidate(2, 123)]),  # once, whoever else has it
        ([candidate(0, 108), candidate(2, 123)], [candidate(2, 123)]),
        ([candidate(1, 123), candidate(2, 123)], []),
        ([candidate(1, 123), candidate(2, 90)], []),
        ([], []),
        (
            [
                candidate(0, 9, 0, 3),
                candidate(2, 9, 1, 3),
                candidate(2, 9, 2, 3),
                candidate(3, 9, 2, 3),
            ],
            [candidate(2, 9, 1, 3), candidate(2, 9, 2, 3)],
        ),
        ([candidate(0, 9, 0, 2), candidate(2, 10, 1, 2)], []),  # it is nowhere whole
    ],
)
def test_what_the_group_lacks_of_the_newest_state_is_brought(
    candidates: list[Candidate], brought: list[Candidate]
) -> None:
    """The group has nodes 0 and 1."""
    assert pieces_to_bring(candidates, 2, submission=1) == brought
