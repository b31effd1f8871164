"""The order of summation: one expression at every world size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_fn.elastic.sum_tree import Fold, OpenTree, SumTree, completion, group_size
from train_fn.samples.sampler import Sampler, share_of
from train_fn.samples.streams import StreamSampler


def together(left: str, right: str) -> str:
    return f"({left}+{right})"


def expression(tree: SumTree, shares: Sequence[range]) -> str:
    """The sum that ranks with these shares compute, as text."""
    plan, slots = completion(tree, shares), list[str]()
    for share, expected in zip(shares, plan.by_rank, strict=True):
        fold = Fold(tree, together)
        for number in share:
            fold.push(number, str(number))
        assert tuple(node for node, _ in fold.nodes) == expected
        slots += [value for _, value in fold.nodes]
    for to, source in plan.additions:
        slots[to] = together(slots[to], slots[source])
    return slots[0]


@st.composite
def trees(draw: st.DrawFn) -> SumTree:
    size = draw(st.integers(1, 48))
    return SumTree(size, draw(st.integers(1, size)))


@given(trees(), st.data())
def test_any_contiguous_shares_compute_one_expression(tree: SumTree, data: st.DataObject) -> None:
    """Also where some are empty, and of a batch that is shorter than its groups suggest."""
    whole = expression(tree, [range(tree.size)])
    for world_size in range(1, min(tree.size, 8) + 3):
        shares = [share_of(tree.size, rank, world_size) for rank in range(world_size)]
        assert expression(tree, shares) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, tree.size), max_size=8)))
    ends = [0, *cuts, tree.size]
    assert expression(tree, [range(*pair) for pair in itertools.pairwise(ends)]) == whole


@pytest.mark.parametrize(("num_micro", "max_workers"), [(8, 2), (12, 3), (24, 8), (15, 5), (6, 1)])
def test_a_rank_has_one_node_at_full_size(num_micro: int, max_workers: int) -> None:
    tree = SumTree(num_micro, group_size(num_micro, max_workers))
    shares = [share_of(num_micro, rank, max_workers) for rank in range(max_workers)]
    assert completion(tree, shares).most_nodes == 1


def test_the_tree_is_written_down() -> None:
    """A change of it would change the bits of every run that resumes."""
    assert expression(SumTree(7, 7), [range(7)]) == "(((0+1)+(2+3))+((4+5)+6))"
    assert expression(SumTree(9, 3), [range(9)]) == "((((0+1)+2)+((3+4)+5))+((6+7)+8))"
    assert expression(SumTree(8, 3), [range(8)]) == "((((0+1)+2)+((3+4)+5))+(6+7))"
    assert (group_size(9, 3), group_size(8, 3)) == (3, 8)


@given(st.integers(1, 70))
def test_what_an_open_tree_merges_are_nodes_of_the_whole_one(size: int) -> None:
    fold = Fold(OpenTree(), together)
    for number in range(size):
        fold.push(number, str(number))
    whole = Fold(SumTree(size, size), together)
    for node, value in fold.nodes:
        whole.put(node, value)
    assert [value for _, value in whole.nodes] == [expression(SumTree(size, size), [range(size)])]


@pytest.mark.parametrize("sampler", [Sampler(90, 20, 3, 0), StreamSampler(90, 20, 3, 0, 4)])
def test_numbers_are_those_of_a_ranks_share(sampler: Sampler) -> None:
    for world_size in (1, 2, 3, 5, 9):
        for k in (0, sampler.steps_per_epoch - 1):
            found = [list(sampler.numbers(k, rank, world_size)) for rank in range(world_size)]
            assert found == [
                [micro.number for micro in sampler.share(0, k, rank, world_size)]
                for rank in range(world_size)
            ]
            assert list(itertools.chain(*found)) == list(range(sampler.num_micro(k)))
