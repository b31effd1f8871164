"""A node's arithmetic is compared by every bit of a product, between nodes that must agree."""

from __future__ import annotations

import logging

import pytest
import torch

from train_fn.node.device import Product, compare_products
from train_fn.node.preflight import NodeFigures, unfit, wrong

CPU = torch.device("cpu")


def computed() -> str:
    product = Product(CPU)
    product.compute()
    assert product.digest is not None
    return product.digest


def test_a_product_is_the_same_each_time_and_one_low_bit_changes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = computed()
    assert computed() == right
    product = Product(CPU)
    product.compute()
    assert product.digest == right
    whole = torch.Tensor.__matmul__

    def flipped(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        result = whole(one, other)
        result.view(torch.int32)[700, 3] ^= 1
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", flipped)
    assert computed() != right
    with pytest.raises(ValueError, match="another one when it is computed again"):
        product.compute()


def test_who_differs_from_most_is_named_and_other_kernels_are_not_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    same = {rank: ("A", "aa") for rank in range(3)}
    assert compare_products(same | {7: ("B", "bb")}) == ({}, [])
    problems, undecided = compare_products(same | {3: ("A", "cc")})
    assert list(problems) == [3] and undecided == []
    assert "its digest is cc, and aa on 3 of 4 nodes" in problems[3]
    problems, undecided = compare_products({0: ("A", "aa"), 1: ("A", "cc")})
    assert problems == {} and "no majority shows which" in undecided[0]

    found = [NodeFigures(rank, kernels="A", product="aa") for rank in range(3)]
    found[1].product = "cc"
    assert list(unfit(found)) == [1] == list(wrong(found))
    found[2].product, found[2].problems = None, ["matmul: broken"]
    with caplog.at_level(logging.WARNING):
        assert wrong(found) == {2: ["matmul: broken"]}
    assert "aa on rank 0, cc on rank 1" in caplog.text
