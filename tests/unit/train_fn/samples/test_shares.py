"""How ranks divide micro-batches by their speed: the plan, and when it changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train_fn.samples.sampler import Sampler, share_of
from train_fn.samples.shares import MIN_STEPS, Division, SharePlanner, divided
from train_fn.samples.token_batches import TokenSampler

COSTS = st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=6).map(tuple)


@given(costs=COSTS, count=st.integers(0, 8) | st.integers(0, 300))
def test_every_rank_takes_one_and_more_micro_batches_take_none_away(
    costs: tuple[float, ...], count: int
) -> None:
    counts, more = divided(count, costs), divided(count + 1, costs)
    assert sum(counts) == count
    assert all(counts[: min(count, len(costs))])
    assert all(one <= other for one, other in zip(counts, more, strict=True))


@given(costs=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=3).map(tuple))
def test_no_other_plan_ends_earlier(costs: tuple[float, ...]) -> None:
    count = 8
    plans = itertools.product(range(1, count + 1), repeat=len(costs))
    ends = [ends_of(plan, costs) for plan in plans if sum(plan) == count]
    assert ends_of(divided(count, costs), costs) == min(ends)


def ends_of(plan: Sequence[int], costs: Sequence[float]) -> float:
    return max(own * cost for own, cost in zip(plan, costs, strict=True))


@given(
    count=st.integers(0, 9) | st.integers(0, 10_000),
    world_size=st.integers(1, 9),
    cost=st.floats(1e-6, 1e3),
)
def test_ranks_of_one_speed_have_equal_shares(count: int, world_size: int, cost: float) -> None:
    division = Division()
    assert division.of(count, world_size) is None
    division.costs = (cost,) * world_size
    assert division.of(count, world_size) == tuple(
        share_of(count, rank, world_size) for rank in range(world_size)
    )
    assert division.of(count, world_size + 1) is None


def test_samplers_follow_the_shares_and_cut_the_same_batches() -> None:
    lengths = Sampler(90, 32, 4, 0).global_batch(0, 0) % 7 + 1
    for sampler in (Sampler(90, 32, 4, 0), TokenSampler(len(lengths), 32, 8, 0, lengths=lengths)):
        whole = [sampler.share(1, k, 0, 1) for k in range(sampler.steps_per_epoch)]
        sampler.division.costs = (1.0, 3.0, 1.5)
        for k, micros in enumerate(whole):
            shares = [sampler.share(1, k, rank, 3) for rank in range(3)]
            found = [micro for share in shares for micro in share]
            assert [micro.indices.tolist() for micro in found] == [
                micro.indices.tolist() for micro in micros
            ]
            assert [len(share) for share in shares] == list(divided(len(micros), (1.0, 3.0, 1.5)))
            for rank, share in enumerate(shares):
                assert [micro.number for micro in share] == list(sampler.numbers(k, rank, 3))


SLICES = 8
"""Of a micro-batch, in which a rank's speed may change."""


class Group:
    """A planner and simulated ranks: ``seconds(rank, now)`` of a micro-batch, and seconds of each
    rank's step beside them."""

    def __init__(
        self,
        seconds: Callable[[int, float], float],
        world_size: int,
        count: int = 8,
        beside: Sequence[float] = (),
        known: Sequence[float | None] = (),
    ) -> None:
        self.division, self.now = Division(), 0.0
        self.planner = SharePlanner(self.division, count, known or [None] * world_size)
        self._seconds, self._beside = seconds, beside or [0.0] * world_size
        self.plans = [self.planner.counts]
        self.step_s: list[float] = []
        """Of each plan, the last one."""

    def _own_s(self, rank: int, own: int) -> float:
        took_s = self._beside[rank]
        for _ in range(SLICES * own):
            took_s += self._seconds(rank, self.now + took_s) / SLICES
        return took_s

    def train(self, num_steps: int) -> None:
        before = (0.0,)  # not measured
        for _ in range(num_steps):
            own_s = tuple(map(self._own_s, range(len(self._beside)), self.planner.counts))
            self.now += max(own_s)
            if self.planner.note(before):
                self.plans.append(self.planner.counts)
                self.step_s.append(max(own_s))
            before = own_s
        self.step_s.append(max(before))


@settings(max_examples=30)
@given(
    costs=st.lists(st.floats(0.01, 0.5), min_size=2, max_size=5),
    data=st.data(),
    count=st.integers(6, 40),
)
def test_each_change_of_steady_ranks_makes_steps_shorter(
    costs: list[float], data: st.DataObject, count: int
) -> None:
    """Also if a part of each step is the same whatever the share."""
    beside = [cost * data.draw(st.floats(0, 4)) for cost in costs]
    group = Group(lambda rank, now: costs[rank], len(costs), count, beside)
    group.train(1500)
    assert all(one > other for one, other in itertools.pairwise(group.step_s))
    assert len(group.plans) < 12


def test_whatever_speeds_do_changes_become_rare() -> None:
    """A rank that turns slow whenever the plan trusts it, and fast when it does not."""
    group = Group(lambda rank, now: 0.05, 2)
    group._seconds = lambda rank, now: (0.05, 0.2 if group.plans[-1][1] >= 4 else 0.02)[rank]
    while group.now < 1200:
        group.train(100)
    assert 3 < len(group.plans) <= 8


@pytest.mark.parametrize("slow_s", [6.0, 16.0])
def test_a_rank_that_is_slow_only_for_a_while_keeps_its_share(slow_s: float) -> None:
    """As it writes a checkpoint: for most of a window, and once in a single step."""
    group = Group(lambda rank, now: 0.2 if rank == 0 and now < slow_s else 0.05, 2)
    group.train(600)
    once = Group(lambda rank, now: 0.05 + 3.0 * (rank == 0 and now < 0.1), 2)
    once.train(600)
    assert group.plans == once.plans == [(4, 4)]


def test_a_rank_that_turns_slow_later_is_found() -> None:
    group = Group(lambda rank, now: 0.05 if rank == 0 or now < 100 else 0.1, 2)
    group.train(1000)
    assert group.plans[0] == (4, 4) and group.plans[-1][1] < 4


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_steps_in_which_a_rank_is_not_measured_count_for_nothing(bad: float) -> None:
    planner = SharePlanner(Division(), 8, [None, None])
    assert not any(planner.note((1.0, bad)) for _ in range(10 * MIN_STEPS))
    assert planner.counts == (4, 4)


def test_an_attempt_begins_with_what_is_known_of_its_hosts() -> None:
    def begun(*known: float | None) -> tuple[int, ...]:
        return SharePlanner(Division(), 12, known).counts

    assert begun(None, None, None) == begun(0.1, 0.1, 0.101) == (4, 4, 4)
    assert begun(0.1, 0.2, 0.1) == (5, 2, 5)
    assert begun(0.1, math.nan, 0.1) == begun(0.1, 0.0, 0.1) == (4, 4, 4)


def test_the_row_that_follows_a_change_is_of_the_plan_before() -> None:
    planner = SharePlanner(Division(), 8, (None, None))
    noted = [planner.note((4.0, 8.0)) for _ in range(MIN_STEPS)]
    assert noted == [False] * (MIN_STEPS - 1) + [True] and planner.counts == (6, 2)
    planner.note((4.0, 8.0))
    noted = [planner.note((12.0, 4.0)) for _ in range(MIN_STEPS)]
    assert noted == [False] * (MIN_STEPS - 1) + [True]
