"""Which nodes are left out where not all reach each other, and for how long; and what a node's
answer is."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from train_fn.node.network import ask
from train_fn.recovery.links import ExcludedNodes, nodes_to_exclude
from train_fn.recovery.sizing import NodeView

NODES = ("a", "b", "c", "d", "e")


def view(node_id: str) -> NodeView:
    return NodeView(node_id, "10.0.0.1", 1, {"CPU": 1.0}, {"CPU": 1.0})


@given(st.dictionaries(st.sampled_from(NODES), st.sets(st.sampled_from(NODES))))
def test_those_left_all_reach_each_other(unreached: dict[str, set[str]]) -> None:
    pairs = [(node, other) for node, others in unreached.items() for other in others]
    out = nodes_to_exclude(unreached)
    assert all(node in out or other in out for node, other in pairs)
    assert len(out) == len(set(out)) <= len({frozenset(pair) for pair in pairs})


@given(st.dictionaries(st.sampled_from(NODES), st.sets(st.sampled_from(NODES))))
def test_the_node_with_most_broken_pairs_goes_first(unreached: dict[str, set[str]]) -> None:
    """As if all pairs that are left were counted again after each node."""
    pairs = {frozenset((node, other)) for node, others in unreached.items() for other in others}
    for out in nodes_to_exclude(unreached):
        broken = Counter(node for pair in pairs for node in pair)
        assert out == max(broken, key=lambda node: (broken[node], node))
        pairs = {pair for pair in pairs if out not in pair}
    assert not pairs


def test_a_node_that_nobody_reaches_goes_alone() -> None:
    assert nodes_to_exclude({"a": ["b"], "b": [], "c": ["b"]}) == ["b"]


def test_of_two_that_do_not_reach_each_other_one_goes_always_the_same() -> None:
    assert (
        nodes_to_exclude({"a": ["b"], "b": [], "c": []})
        == nodes_to_exclude({"a": [], "b": ["a"], "c": []})
        == ["b"]
    )


def test_a_node_takes_no_rank_while_it_is_apart_and_longer_each_time() -> None:
    excluded = ExcludedNodes(60.0)

    def out(now: float) -> list[str]:
        return [
            node.node_id for node in excluded.mark((view("a"), view("b")), now) if not node.usable
        ]

    assert out(0.0) == []
    excluded.exclude(["b"], 0.0)
    assert (out(59.0), out(60.0)) == (["b"], [])
    excluded.exclude(["b"], 100.0)
    assert (out(219.0), out(220.0)) == (["b"], [])
    for _ in range(10):
        excluded.exclude(["b"], 1000.0)
    assert (out(1959.0), out(1960.0)) == (["b"], [])


def test_a_host_that_refuses_is_there_and_one_that_says_nothing_may_not_be() -> None:
    with contextlib.ExitStack() as sockets:
        open_, closed, full = (sockets.enter_context(socket.socket()) for _ in range(3))
        for listener in (open_, closed, full):
            listener.bind(("127.0.0.1", 0))
        open_.listen()
        full.listen(0)  # what comes beyond the queue is dropped without a word
        for _ in range(4):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        assert ask([listener.getsockname() for listener in (open_, closed, full)], 0.3) == [
            True,
            False,
            None,
        ]
