"""Which nodes are left out where not all reach each other, and for how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from train_fn.recovery.apart import Apart, nodes_apart
from train_fn.recovery.sizing import NodeView

NODES = ("a", "b", "c", "d", "e")


def view(node_id: str) -> NodeView:
    return NodeView(node_id, "10.0.0.1", 1, {"CPU": 1.0}, {"CPU": 1.0})


@given(st.dictionaries(st.sampled_from(NODES), st.sets(st.sampled_from(NODES))))
def test_those_left_all_reach_each_other(unreached: dict[str, set[str]]) -> None:
    pairs = [(node, other) for node, others in unreached.items() for other in others]
    out = nodes_apart(unreached)
    assert all(node in out or other in out for node, other in pairs)
    assert len(out) == len(set(out)) <= len({frozenset(pair) for pair in pairs})


def test_a_node_that_nobody_reaches_goes_alone() -> None:
    assert nodes_apart({"a": ["b"], "b": [], "c": ["b"]}) == ["b"]


def test_of_two_that_do_not_reach_each_other_one_goes_always_the_same() -> None:
    assert nodes_apart({"a": ["b"], "b": [], "c": []}) == nodes_apart({"a": [], "b": ["a"], "c": []}) == ["b"]


def test_a_node_takes_no_rank_while_it_is_apart_and_longer_each_time() -> None:
    apart = Apart(60.0)

    def out(now: float) -> list[str]:
        return [node.node_id for node in apart.mark((view("a"), view("b")), now) if not node.usable]

    assert out(0.0) == []
    apart.leave_out(["b"], 0.0)
    assert (out(59.0), out(60.0)) == (["b"], [])
    apart.leave_out(["b"], 100.0)
    assert (out(219.0), out(220.0)) == (["b"], [])
    for _ in range(10):
        apart.leave_out(["b"], 1000.0)
    assert (out(1959.0), out(1960.0)) == (["b"], [])
