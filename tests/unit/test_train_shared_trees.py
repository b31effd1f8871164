"""Trees on their way to another process, here over a connection within one: what arrives, and what is sent for it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train_fn.shared_trees import NotShared, TreeReceiver, TreeSender
from train_fn.tensor_tree import copy_to_cpu

Ends = tuple[TreeSender, TreeReceiver]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = Pipe()
    with ours, theirs:
        yield TreeSender(ours, os.getpid()), TreeReceiver(theirs)


def arrives(ends: Ends, tree: Any) -> Any:
    ends[0].send(tree)
    return ends[1].receive()


def test_plain_values_and_tensors_arrive_in_their_places(ends: Ends) -> None:
    tree = {
        "step": 7,
        "lr": 0.1,
        "betas": (0.9, None),
        "a": torch.arange(6).view(2, 3),
        "more": [torch.tensor(True), {1: torch.empty(0)}],
    }
    found = arrives(ends, copy_to_cpu(tree, shared=True))
    assert {name: found[name] for name in ("step", "lr", "betas")} == {"step": 7, "lr": 0.1, "betas": (0.9, None)}
    assert found["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["more"][0].item() is True
    assert found["more"][1][1].shape == (0,)


def test_the_same_memory_is_not_told_twice_and_new_bytes_are_seen(ends: Ends) -> None:
    tree = {"a": torch.ones(1000), "b": torch.zeros(2)}
    copied = copy_to_cpu(tree, shared=True)
    first = arrives(ends, copied)
    files = len(list(Path("/proc/self/fd").iterdir()))
    for step in range(2, 30):
        tree["a"].fill_(step)
        copied = copy_to_cpu(tree, copied, shared=True)
        found = arrives(ends, {**copied, "step": step})
        assert found["step"] == step and found["a"].eq(step).all()
        assert found["a"] is first["a"], "mapped once"
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_what_a_tree_does_not_have_any_more_is_let_go_at_both_ends(ends: Ends) -> None:
    def mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("everstep-state")

    before = mapped()
    copied = copy_to_cpu({"a": torch.ones(10)}, shared=True)
    arrives(ends, copied)
    assert mapped() == before + 2, "once at each end"
    for size in range(2, 20):
        copied = copy_to_cpu({"a": torch.ones(10), "odd": torch.full((size,), float(size))}, copied, shared=True)
        found = arrives(ends, copied)
        assert found["odd"].tolist() == [float(size)] * size and found["a"].tolist() == [1.0] * 10
        del found
        assert mapped() <= before + 7, "of the tree, and of the one before"
    del copied
    arrives(ends, copy_to_cpu({"a": torch.ones(1)}, shared=True))
    arrives(ends, copy_to_cpu({"a": torch.ones(1)}, shared=True))
    assert mapped() <= before + 5


def test_a_message_without_tensors_leaves_what_was_told(ends: Ends) -> None:
    copied = copy_to_cpu({"a": torch.ones(3)}, shared=True)
    first = arrives(ends, copied)
    assert arrives(ends, ("retain", 3, None)) == ("retain", 3, None)
    assert arrives(ends, copied)["a"] is first["a"]


def test_of_other_memory_nothing_is_sent_and_the_next_tree_arrives(ends: Ends) -> None:
    copied = copy_to_cpu({"a": torch.ones(3)}, shared=True)
    with pytest.raises(NotShared):
        ends[0].send({**copied, "b": torch.zeros(3)})
    assert arrives(ends, copied)["a"].tolist() == [1.0, 1.0, 1.0]


def test_one_tensor_in_two_places_is_one_tensor(ends: Ends) -> None:
    copied = copy_to_cpu({"a": torch.ones(3)}, shared=True)
    found = arrives(ends, {"model": copied, "ema": {"weight": copied["a"]}})
    assert found["ema"]["weight"] is found["model"]["a"]


trees = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.tuples(st.integers(0, 5), st.sampled_from([torch.float32, torch.int64, torch.uint8])),
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(st.lists(trees, min_size=1, max_size=8))
def test_whatever_changes_between_trees_each_arrives_whole(history: list[dict[str, tuple[int, torch.dtype]]]) -> None:
    """Tensors that come, go, and change shape or dtype under their names."""
    ours, theirs = Pipe()
    with ours, theirs:
        ends, copied = (TreeSender(ours, os.getpid()), TreeReceiver(theirs)), None
        for step, shapes in enumerate(history):
            tree = {name: torch.full((size,), step + 1, dtype=dtype) for name, (size, dtype) in shapes.items()}
            copied = copy_to_cpu({"step": step, **tree}, copied, shared=True)
            found = arrives(ends, copied)
            assert found.pop("step") == step and found.keys() == tree.keys()
            for name, tensor in tree.items():
                assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
