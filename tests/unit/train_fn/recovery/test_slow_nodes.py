"""Moves away from slow nodes: one at a time, and none that cannot help."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from everstep.wire.events import EventKind
from train_fn.recovery.hang import ProgressTracker
from train_fn.recovery.links import AWAY_S, EVEN_LOOKS, SlowNodes, SlowRank, Speeds


def slow_on(*nodes: str) -> Speeds:
    return Speeds(tuple(SlowRank(rank, node, 1.5 + rank) for rank, node in enumerate(nodes)))


EVEN = Speeds((), EVEN_LOOKS)


def anywhere(_node: str) -> bool:
    return True


def test_the_slowest_rank_moves_first_and_the_next_one_once_that_has_helped() -> None:
    nodes = SlowNodes(moves=True)
    first = nodes.leave(slow_on("a", "b"), 1, 0.0, anywhere)
    assert first is not None and (first.slow.node_id, first.stays) == ("b", None)
    assert nodes.leave(slow_on("a"), 2, 60.0, anywhere) is None, "nobody knows yet"
    assert nodes.judge(Speeds((), EVEN_LOOKS - 1), 2, 60.0) is None
    judged = nodes.judge(EVEN, 2, 120.0)
    assert judged is not None and judged.stays and nodes.judge(EVEN, 2, 121.0) is None
    second = nodes.leave(slow_on("a"), 2, 180.0, anywhere)
    assert second is not None and nodes.away(180.0) == {"a", "b"}
    assert nodes.away(AWAY_S) == {"a"}


def test_where_another_node_is_as_slow_nothing_moves_for_an_hour() -> None:
    nodes = SlowNodes(moves=True)
    nodes.leave(slow_on("a"), 1, 0.0, anywhere)
    judged = nodes.judge(slow_on("b"), 2, 70.0)
    assert judged is not None and judged.stays is False
    assert nodes.leave(slow_on("b"), 2, 70.0 + AWAY_S - 1, anywhere) is None
    assert nodes.leave(slow_on("b"), 2, 70.0 + AWAY_S, anywhere) is not None


def test_nothing_moves_unless_the_spec_says_so_or_where_there_is_no_room() -> None:
    assert SlowNodes(moves=False).leave(slow_on("a"), 1, 0.0, anywhere) is None
    nodes = SlowNodes(moves=True)
    assert nodes.leave(slow_on("a", "b"), 1, 0.0, lambda node: node == "a") is not None
    assert nodes.away(1.0) == {"a"}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(1.0, 900.0), st.booleans())))
def test_no_node_is_left_twice_within_an_hour(
    history: list[tuple[str, float, bool]],
) -> None:
    nodes, now, left = SlowNodes(moves=True), 0.0, dict[str, float]()
    for attempt, (node, later_s, is_even) in enumerate(history):
        now += later_s
        nodes.judge(EVEN if is_even else slow_on(node), attempt, now)
        if (move := nodes.leave(slow_on(node), attempt, now, anywhere)) is not None:
            assert now - left.get(node, float("-inf")) >= AWAY_S
            assert move.slow.node_id == node
            left[node] = now


def test_speeds_are_those_of_the_newest_attempt() -> None:
    tracker = ProgressTracker()
    tracker.note(EventKind.ATTEMPT_STARTED, 1, {})
    slow = {"rank": 1, "node_id": "a", "slow": True, "skew": 2.0}

    def times(skew: float) -> dict[str, object]:
        return {"ranks": [{"skew": 1.0}, {"skew": skew}]}

    tracker.note(EventKind.RANK_TIMES, 1, times(1.2))
    tracker.note(EventKind.RANK_TIMES, 1, times(2.0))
    tracker.note(EventKind.STRAGGLER, 1, slow)
    assert tracker.progress().speeds == Speeds((SlowRank(1, "a", 2.0),), 0)
    tracker.note(EventKind.STRAGGLER, 1, {**slow, "slow": False})
    tracker.note(EventKind.RANK_TIMES, 1, times(1.0))
    assert tracker.progress().speeds == Speeds((), 1)
    tracker.note(EventKind.STRAGGLER, 1, slow)
    tracker.note(EventKind.ATTEMPT_STARTED, 2, {})
    assert tracker.progress().speeds == Speeds()
