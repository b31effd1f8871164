"""Memory of copies that another process can map: what it holds, where its tensors lie, and that nothing is left of it."""

from __future__ import annotations

import gc
import io
import mmap
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from train_fn import shared_tensors
from train_fn.shared_tensors import Block, Place, place_of
from train_fn.tensor_tree import copy_to_cpu

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]


def make_tree() -> dict[str, torch.Tensor]:
    tensors = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES}
    turned = torch.randn(4, 6).t()
    return {**tensors, "scalar": torch.tensor(7), "empty": torch.empty(0, 3), "turned": turned, "view": torch.randn(100)[3:9]}


def found_places(tree: Mapping[str, torch.Tensor]) -> tuple[list[Place], dict[int, Block]]:
    """Where the tensors of a shared copy lie, and the blocks by their numbers."""
    found = [place_of(tensor) for tensor in tree.values()]
    assert None not in found
    places = [each[0] for each in found if each is not None]
    return places, {block.number: block for each in found if each is not None and (block := each[1]) is not None}


def seen_elsewhere(tree: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a shared copy as who maps its blocks by descriptor and size sees them."""
    places, blocks = found_places(tree)
    elsewhere = {number: mmap.mmap(block.fd, len(block)) for number, block in blocks.items()}
    return [place.tensor_in(elsewhere) for place in places]


def descriptors() -> int:
    return sum("everstep-state" in str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())


def test_another_mapping_of_the_memory_holds_the_same_tensors() -> None:
    tree = make_tree()
    copied = copy_to_cpu(tree, shared=True)
    elsewhere = seen_elsewhere(copied)
    assert len(elsewhere) == len(tree)
    for source, found in zip(tree.values(), elsewhere, strict=True):
        assert (found.shape, found.dtype) == (source.shape, source.dtype)
        assert torch.equal(found.to(torch.complex128), source.to(torch.complex128))


def test_a_second_copy_lies_in_the_memory_of_the_first_and_is_seen_there() -> None:
    tree = make_tree()
    first = copy_to_cpu(tree, shared=True)
    elsewhere = seen_elsewhere(first)
    tree["view"] = torch.full((6,), 8.0)
    second = copy_to_cpu(tree, first, shared=True)
    assert second["view"] is first["view"]
    assert torch.equal(elsewhere[-1], torch.full((6,), 8.0))


def test_what_does_not_fit_gets_a_block_of_its_own_and_the_rest_stays() -> None:
    tree = {"a": torch.ones(100), "b": torch.ones(3)}
    first = copy_to_cpu(tree, shared=True)
    second = copy_to_cpu({**tree, "b": torch.full((5,), 2.0), "c": torch.zeros(2)}, first, shared=True)
    (a, b, c), blocks = found_places(second)
    assert a.block != b.block == c.block and blocks.keys() == {a.block, b.block}
    assert second["a"] is first["a"]
    assert [tensor.tolist() for tensor in seen_elsewhere(second)[1:]] == [[2.0] * 5, [0.0] * 2]


def test_tensors_begin_at_aligned_places_and_never_overlap() -> None:
    tree = {str(number): torch.full((number,), number, dtype=torch.uint8) for number in range(1, 200, 7)}
    copied = copy_to_cpu(tree, shared=True)
    places, _ = found_places(copied)
    assert all(place.offset % 64 == 0 for place in places)
    assert all(torch.equal(copied[name], tree[name]) for name in tree)


def test_a_tensor_is_saved_without_its_neighbours() -> None:
    copied = copy_to_cpu({"large": torch.zeros(1 << 20), "small": torch.ones(3)}, shared=True)
    file = io.BytesIO()
    torch.save(copied["small"], file)
    assert len(file.getvalue()) < 4096


def test_tensors_that_lie_elsewhere_have_no_place() -> None:
    copy_to_cpu({"a": torch.ones(3)}, shared=True)
    assert place_of(torch.ones(3)) is None
    assert place_of(copy_to_cpu(torch.ones(3))) is None
    assert place_of(torch.empty(0, 3)) == (Place(None, 0, (0, 3), torch.float32), None)


def test_memory_and_descriptor_go_with_the_last_tensor() -> None:
    gc.collect()
    before = descriptors()
    copied = copy_to_cpu(make_tree(), shared=True)
    assert descriptors() == before + 2, "one of the mapping's own"
    scalar = copied["scalar"]
    del copied
    gc.collect()
    assert descriptors() == before + 2 and scalar == 7
    del scalar
    gc.collect()
    assert descriptors() == before


def test_without_descriptors_copies_lie_in_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(shared_tensors.os, "memfd_create", none_left)
    copied = copy_to_cpu({"a": torch.arange(5), "b": torch.empty(0)}, shared=True)
    assert copied["a"].tolist() == [0, 1, 2, 3, 4] and place_of(copied["a"]) is None


def test_an_empty_tensor_keeps_its_shape() -> None:
    assert Place(None, 0, (0, 3), torch.int16).tensor_in({}).shape == (0, 3)
