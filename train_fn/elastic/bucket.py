"""A few tensors that are summed together: how they lie in one flat run of memory, and how a rank
folds its micro-batches' values of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from train_fn.elastic.sum_tree import Completion, Fold, SumTree, TreeNode

ALIGNMENT = 64
"""Alignment in bytes of every tensor in flat memory, and of the slices that ranks own: that of
torch's own allocations on a CPU, so that kernels meet the same memory at every world size."""

Values = list[torch.Tensor | None]
"""One value for each tensor of a bucket; None where a micro-batch has none."""


class Layout:
    """Place tensors of one dtype in a flat run of memory.

    Args:
        likes: tensors with the shapes and strides of the values.
        world_size: the memory divides into as many equal slices.
    """

    def __init__(self, likes: Sequence[torch.Tensor], world_size: int) -> None:
        likes = [real(like.detach()) for like in likes]
        self.dtype, self.device = likes[0].dtype, likes[0].device
        self._forms = [_form(like) for like in likes]
        aligned = ALIGNMENT // likes[0].element_size()
        self._begins, end = list[int](), 0
        for like in likes:
            self._begins.append(end)
            end += -(-like.numel() // aligned) * aligned
        self.slice_numel = -(-end // (aligned * world_size)) * aligned
        self.numel = self.slice_numel * world_size
        self.num_bytes = self.numel * likes[0].element_size()

    def memory(self) -> torch.Tensor:
        """Return new flat memory: shape (numel,)."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that lie in flat memory."""
        start = flat.storage_offset()
        return [
            flat.as_strided(size, stride, start + begin)
            for (size, stride), begin in zip(self._forms, self._begins, strict=True)
        ]

    def normal(self, value: torch.Tensor, position: int) -> torch.Tensor:
        """Return ``value`` in the memory order of its tensor, in which every rank has it."""
        size, stride = self._forms[position]
        if value.stride() == stride:
            return value
        if all(
            length == 1 or own == wanted
            for length, own, wanted in zip(size, value.stride(), stride, strict=True)
        ):
            return value.as_strided(size, stride, value.storage_offset())
        return torch.empty_strided(size, stride, dtype=self.dtype, device=self.device).copy_(value)

    @torch.no_grad()
    def pack(self, values: Values, flat: torch.Tensor) -> None:
        """Copy values into flat memory."""
        views = self.views(flat)
        pairs = list(zip(views, values, strict=True))
        there = [(view, value) for view, value in pairs if value is not None]
        if there:
            torch._foreach_copy_([view for view, _ in there], [value for _, value in there])
        for view, value in pairs:
            if value is None:
                view.fill_(NOTHING)

    @torch.no_grad()
    def filled(self, values: Values) -> list[torch.Tensor]:
        """Return values with tensors that add nothing in place of None."""
        return [
            torch.empty_strided(size, stride, dtype=self.dtype, device=self.device).fill_(NOTHING)
            if value is None
            else value
            for (size, stride), value in zip(self._forms, values, strict=True)
        ]


NOTHING = -0.0
"""The number that changes no other one, not even -0.0, when it is added."""


class Bucket:
    """Fold the values of one rank's micro-batches, step by step."""

    def __init__(self, likes: Sequence[torch.Tensor], world_size: int) -> None:
        self.layout = Layout(likes, world_size)
        self._tree, self.plan = SumTree(1, 1), Completion(((),), ())
        self._fold: Fold[Values] = Fold(self._tree, add_values)

    def begin(self, tree: SumTree, plan: Completion) -> None:
        """Begin a step of this tree, whose nodes the ranks have as ``plan`` says."""
        self._tree, self.plan = tree, plan
        self._fold = Fold(tree, add_values)

    @torch.no_grad()
    def push(self, number: int, values: Values) -> None:
        """Add the values of micro-batch ``number``, which the bucket owns from then on."""
        self._fold.push(
            number,
            [
                None if value is None else self.layout.normal(real(value), position)
                for position, value in enumerate(values)
            ],
        )

    def take(self, rank: int) -> list[Values]:
        """Return the values of this rank's nodes, ascending, and forget them."""
        nodes, self._fold = self._fold.nodes, Fold(self._tree, add_values)
        expected: tuple[TreeNode, ...] = self.plan.by_rank[rank]
        assert tuple(node for node, _ in nodes) == expected, (nodes, expected)
        return [values for _, values in nodes]


@torch.no_grad()
def add_values(left: Values, right: Values) -> Values:
    """Add the second values to the first, in place where both have one."""
    both = [
        (one, other)
        for one, other in zip(left, right, strict=True)
        if one is not None and other is not None
    ]
    if both:
        torch._foreach_add_([one for one, _ in both], [other for _, other in both])
    return [other if one is None else one for one, other in zip(left, right, strict=True)]


@torch.no_grad()
def complete(plan: Completion, slots: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add the nodes of all ranks, or a slice of each, in the tree's order. Overwrites the first of
    them, and returns it."""
    for to, source in plan.additions:
        slots[to].add_(slots[source])
    return slots[0]


def real(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor as real numbers: the last dimension of a complex one has both parts."""
    return torch.view_as_real(value) if value.is_complex() else value


def _form(like: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return size and stride of a tensor; those of a contiguous one if its elements do not fill
    its memory."""
    stride = torch.empty_like(like, device="meta").stride()
    return tuple(like.shape), tuple(stride)
