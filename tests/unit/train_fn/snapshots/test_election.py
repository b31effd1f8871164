"""Which state an attempt goes on from: the newest that can be trusted, and the same choice on every
rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.checkpoints.reader import RestorePoint
from storage.checkpoints.reader import in_lineage as checkpoints_in_lineage
from storage.run_dir import CheckpointName
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


def test_a_later_attempt_that_reached_the_same_step_is_believed() -> None:
    elected = elect(
        [candidate(0, 10, "a", attempt=1), candidate(1, 10, "b", attempt=2)], SUBMISSION
    )
    assert elected.candidate is not None
    assert elected.candidate.label.attempt == 2


def test_an_older_submission_counts_and_a_newer_one_does_not() -> None:
    older = candidate(0, 99, submission=2)
    assert elect([older, candidate(1, 120, submission=4)], SUBMISSION).candidate == older
    assert elect([older, candidate(1, 99, "b")], SUBMISSION).candidate == candidate(1, 99, "b"), (
        "at the same step this one's own is believed"
    )


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


def test_an_attempt_that_died_before_it_published_leaves_the_snapshot_that_it_began_from() -> None:
    candidates = [candidate(0, 56), candidate(0, 57)]
    standing, rejected = in_lineage(candidates, went_on(a1=0, a2=57))
    assert (standing, rejected) == (candidates, ())
    assert elect(standing, SUBMISSION).candidate == candidates[1]


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


@dataclass
class Life:
    """One attempt as it goes: the states that it went through, each by who took the step."""

    origin: Origin
    chain: dict[int, Origin]

    @property
    def step(self) -> int:
        return max(self.chain, default=0)

    def train(self, num_steps: int) -> None:
        self.chain |= dict.fromkeys(range(self.step + 1, self.step + num_steps + 1), self.origin)


@dataclass
class World:
    """A run as its storage and its nodes see it, and, beside that, what really happened."""

    starts: dict[Origin, RestorePoint] = field(default_factory=dict)
    snapshots: list[tuple[Label, dict[int, Origin], bool]] = field(default_factory=list)
    """Label, its state's chain, whether its node is there."""
    checkpoints: dict[CheckpointName, dict[int, Origin]] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)

    def begin(self, origin: Origin) -> None:
        """Restore as ranks do, by what can be seen; ``starts`` holds it before the first step, as
        ``claim`` makes sure."""
        standing, _ = in_lineage(
            [Candidate(0, label) for label, _, there in self.snapshots if there], self.starts
        )
        elected = elect(standing, origin[0]).candidate
        durable = self.lineage()
        chain: dict[int, Origin] = self.checkpoints[durable[-1]] if durable else {}
        if elected is not None and elected.label.step > max(chain, default=0):
            chain = next(chain for label, chain, _ in self.snapshots if label == elected.label)
        self.lives.append(Life(origin, dict(chain)))
        self.starts[origin] = RestorePoint(self.lives[-1].step, fresh=not chain)

    def lineage(self) -> list[CheckpointName]:
        """Checkpoints that count."""
        return checkpoints_in_lineage(self.checkpoints, self.starts)

    def leave(self, life: Life, there: bool) -> None:
        submission, attempt = life.origin
        label = Label(submission, attempt, life.step, 0, str(sorted(life.chain.items())), None)
        self.snapshots.append((label, dict(life.chain), there))

    def commit(self, life: Life) -> None:
        self.checkpoints.setdefault(CheckpointName(life.step, *life.origin), dict(life.chain))


ACTS = st.tuples(
    # the next attempt is of the same submission or of a newer one
    st.sampled_from(["same", "newer"]),
    st.integers(0, 5),  # steps that it takes
    st.sampled_from(["snapshot", "lost snapshot", "checkpoint", "both", "nothing"]),
    # what a rank of an older attempt, not dead, does meanwhile
    st.sampled_from([None, "snapshot", "checkpoint", "both"]),
    st.integers(0, 4),  # which one
    st.booleans(),  # nodes that were away come back
)


@given(st.lists(ACTS, min_size=1, max_size=10))
def test_whatever_dies_or_wakes_the_run_has_one_lineage(
    history: list[tuple[str, int, str, str | None, int, bool]],
) -> None:
    """Attempts and submissions follow each other; ranks of older ones may go on for a while, and
    leave what they like."""
    world, origin = World(), (1, 0)
    for follows, num_steps, leaves, zombie_leaves, which, comes_back in history:
        origin = (origin[0] + (follows == "newer"), origin[1] + 1)
        world.begin(origin)
        life = world.lives[-1]
        began = dict(life.chain)
        replaced = world.lives[:-1]
        if zombie_leaves is not None and replaced:
            zombie = replaced[which % len(replaced)]
            zombie.train(2)
            if zombie_leaves in ("snapshot", "both"):
                world.leave(zombie, there=True)
            if zombie_leaves in ("checkpoint", "both"):
                world.commit(zombie)
        life.train(num_steps)
        if "snapshot" in leaves or leaves == "both":
            world.leave(life, there=leaves != "lost snapshot")
        if leaves in ("checkpoint", "both"):
            world.commit(life)
        if comes_back:
            world.snapshots = [(label, chain, True) for label, chain, _ in world.snapshots]
        for name in world.lineage():
            taken = world.checkpoints[name]
            assert taken == {step: by for step, by in life.chain.items() if step <= name.step}, (
                "a checkpoint of another history"
            )
        standing, _ = in_lineage(
            [Candidate(0, label) for label, _, _ in world.snapshots], world.starts
        )
        for label, chain, _ in world.snapshots:
            if Candidate(0, label) in standing and label.origin < origin:
                assert chain == {step: by for step, by in began.items() if step <= label.step}, (
                    "a snapshot of another history"
                )


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
