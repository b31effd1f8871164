"""The order in which the micro-batches of a global batch are added up, whatever the world size.

Floating-point addition is not associative, so a sum over ranks differs with their number. With
``train.exactness: elastic`` every sum over the micro-batches of a step is one expression: a binary
tree over them that the spec alone decides. A rank folds its contiguous share into the few nodes of
the tree that it covers. The ranks exchange these nodes, and add them in the tree's order.

Micro-batches form groups, one for each rank at full size if that divides them evenly. There is a
binary tree within each group, and one over the groups. So at full size every rank holds one node.
Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, NamedTuple, Protocol, TypeVar

Value = TypeVar("Value")

_CACHE_SIZE = 64


class TreeNode(NamedTuple):
    """Name the sum of the micro-batches from ``start`` up to ``stop``, which is excluded."""

    start: int
    stop: int


class Tree(Protocol):
    """Say which nodes are added."""

    def merges(self, left: TreeNode, right: TreeNode) -> bool:
        """Return whether the two are the operands of one addition of the tree."""


class SumTree(NamedTuple):
    """Describe the tree over ``size`` micro-batches, in groups of ``group``."""

    size: int
    group: int

    def merges(self, left: TreeNode, right: TreeNode) -> bool:
        """Return whether the two are the operands of one addition of the tree."""
        return (left.start, left.stop, right.stop) in _additions(self)


class OpenTree(NamedTuple):
    """Describe the binary tree in one group over a number of micro-batches that is not known yet:
    it has the nodes whose size is a power of two."""

    def merges(self, left: TreeNode, right: TreeNode) -> bool:
        size = left.stop - left.start
        return (
            size == right.stop - right.start
            and size & (size - 1) == 0
            and left.stop == right.start
            and left.start % (2 * size) == 0
        )


def group_size(num_micro: int, max_workers: int) -> int:
    """Return the micro-batches of a group: a rank's share at full size, if all are equal.

    Args:
        num_micro: micro-batches of a full global batch.
        max_workers: world size at full size.
    """
    return num_micro // max_workers if num_micro % max_workers == 0 else num_micro


class Fold(Generic[Value]):
    """Add the values of micro-batches, in ascending order, as far as the tree allows.

    Args:
        add: adds its second argument to its first, and returns the sum.
    """

    def __init__(self, tree: Tree, add: Callable[[Value, Value], Value]) -> None:
        self._tree, self._add = tree, add
        self.nodes: list[tuple[TreeNode, Value]] = []
        """The sums so far, ascending."""

    def push(self, number: int, value: Value) -> None:
        """Add the value of micro-batch ``number``."""
        self.put(TreeNode(number, number + 1), value)

    def put(self, node: TreeNode, value: Value) -> None:
        """Add a sum that was folded elsewhere."""
        nodes = self.nodes
        nodes.append((node, value))
        while len(nodes) > 1 and self._tree.merges(nodes[-2][0], nodes[-1][0]):
            (left, first), (right, second) = nodes[-2:]
            nodes[-2:] = [(TreeNode(left.start, right.stop), self._add(first, second))]


class Completion(NamedTuple):
    """Describe how the nodes of all ranks become the sum of the whole tree."""

    by_rank: tuple[tuple[TreeNode, ...], ...]
    """The nodes of each rank, ascending."""
    additions: tuple[tuple[int, int], ...]
    """Pairs (to, source) of positions among the nodes of all ranks: add the second to the first.
    The first position ends up with the sum."""

    @property
    def most_nodes(self) -> int:
        """Return the largest number of nodes of a rank."""
        return max(map(len, self.by_rank))

    @property
    def num_nodes(self) -> int:
        return sum(map(len, self.by_rank))


def completion(tree: SumTree, shares: Sequence[range]) -> Completion:
    """Return how ranks with these shares complete the tree.

    Args:
        shares: the micro-batches of each rank: contiguous and ascending over ranks. Some may be
            empty.
    """
    return _completion(tree, tuple((share.start, share.stop) for share in shares))


@lru_cache(_CACHE_SIZE)
def _completion(tree: SumTree, shares: tuple[tuple[int, int], ...]) -> Completion:
    by_rank = []
    for start, stop in shares:
        fold: Fold[None] = Fold(tree, lambda left, right: None)
        for number in range(start, stop):
            fold.push(number, None)
        by_rank.append(tuple(node for node, _ in fold.nodes))
    additions: list[tuple[int, int]] = []

    def note(to: int, source: int) -> int:
        additions.append((to, source))
        return to

    whole: Fold[int] = Fold(tree, note)
    for position, node in enumerate(node for nodes in by_rank for node in nodes):
        whole.put(node, position)
    assert [node for node, _ in whole.nodes] == [TreeNode(0, tree.size)], (tree, shares)
    return Completion(tuple(by_rank), tuple(additions))


@lru_cache(_CACHE_SIZE)
def _additions(tree: SumTree) -> frozenset[tuple[int, int, int]]:
    """Return the (start, middle, stop) of every addition of the tree."""
    found = []
    open_nodes = [(0, tree.size)]
    while open_nodes:
        start, stop = open_nodes.pop()
        if stop - start < 2:
            continue
        middle = start + _left_size(start, stop, tree.group)
        found.append((start, middle, stop))
        open_nodes += [(start, middle), (middle, stop)]
    return frozenset(found)


def _left_size(start: int, stop: int, group: int) -> int:
    """Return the micro-batches in the left operand of a node of at least two."""
    num_groups = -(-(stop - start) // group)
    if num_groups > 1:
        return group * _power_below(num_groups)
    return _power_below(stop - start)


def _power_below(count: int) -> int:
    """Return the largest power of two below ``count``."""
    return 1 << ((count - 1).bit_length() - 1)
