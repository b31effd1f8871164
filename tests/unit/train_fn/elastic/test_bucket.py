"""Values in flat memory."""

from __future__ import annotations

import torch

from train_fn.elastic.bucket import ALIGNMENT, Bucket, Layout, add_values, real
from train_fn.elastic.sum_tree import SumTree, completion


def test_tensors_of_any_form_come_back_as_they_were() -> None:
    values = [
        torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(7),
        torch.randn(()),
        torch.randn(4, 6).t(),
    ]
    layout = Layout(values, 3)
    flat = layout.memory()
    layout.pack(list(values), flat)
    for value, view in zip(values, layout.views(flat), strict=True):
        assert torch.equal(value, view) and value.stride() == view.stride()
        assert view.data_ptr() % ALIGNMENT == flat.data_ptr() % ALIGNMENT
    assert layout.numel == 3 * layout.slice_numel
    assert layout.slice_numel * 4 % ALIGNMENT == 0


def test_a_value_in_another_order_is_brought_into_that_of_its_tensor() -> None:
    like = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    layout, value = Layout([like], 1), torch.randn(2, 3, 4, 4)
    normal = layout.normal(value, 0)
    assert normal.stride() == like.stride() and torch.equal(normal, value)
    single = torch.randn(5, 1, 1, 1)
    other = single.as_strided((5, 1, 1, 1), (1, 5, 5, 5))
    assert Layout([single], 1).normal(other, 0).data_ptr() == other.data_ptr(), "the same memory"


def test_what_no_micro_batch_used_adds_nothing() -> None:
    """Not even to -0.0, whose sign a sum with 0.0 would lose."""
    likes = [torch.randn(4), torch.randn(4)]
    bucket = Bucket(likes, 1)
    tree = SumTree(3, 3)
    bucket.begin(tree, completion(tree, [range(3)]))
    used = torch.tensor([-0.0, 0.0, 1.0, float("inf")])
    for number, value in enumerate((None, used.clone(), None)):
        bucket.push(number, [value, None])
    total, unused = bucket.layout.filled(bucket.take(0)[0])
    assert torch.equal(total.view(torch.int32), used.view(torch.int32))
    assert torch.signbit(unused).all() and not unused.any()


def test_values_are_added_in_place_of_the_first() -> None:
    first, second = torch.ones(3), torch.full((3,), 2.0)
    [total, only] = add_values([first, None], [second, second])
    assert total is first and total.tolist() == [3, 3, 3] and only is second
    assert real(torch.ones(2, dtype=torch.complex64)).shape == (2, 2)
