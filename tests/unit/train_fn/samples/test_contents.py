"""Sketches of samples: the same for the same thing read on another machine, another for another
thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from train_fn.state.contents import Contents, alike, sketch, sketch_weights, spread

pytestmark = pytest.mark.own_process

PIXELS = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(1))


@dataclass
class Pair:
    left: Any
    right: Any


def picture(change: int = 0) -> Image.Image:
    array = (PIXELS.permute(1, 2, 0) * 255).to(torch.uint8).numpy().copy()
    array[: 32 if change else 0] += np.uint8(change)
    return Image.fromarray(array)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PIXELS, PIXELS + 1e-6),
        (PIXELS.half(), PIXELS.half()),
        (picture(), picture()),
        (
            (PIXELS * 255).to(torch.uint8),
            ((PIXELS * 255).to(torch.uint8).int() + (torch.rand(3, 64, 64) > 0.99)).to(torch.uint8),
        ),
        ({"x": 1, "y": "a"}, {"y": "a", "x": 1}),
        ("/mnt/node1/data/7.png", "/mnt/node2/data/7.png"),
        ({"b", "a"}, {"a", "b"}),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")])),
        (Pair(1, torch.ones(2)), Pair(1, torch.ones(2))),
        (0.1 + 0.2, 0.3),
        (None, None),
    ],
)
def test_the_same_is_alike_also_where_another_machine_computed_it(one: Any, other: Any) -> None:
    assert alike(sketch(one), json.loads(json.dumps(sketch(other))))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PIXELS, PIXELS.flip(2).roll(1, 1) * 1.02),
        (PIXELS, torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(2))),
        (picture(), picture(3)),
        (torch.tensor(3), torch.tensor(4)),
        (torch.tensor(3), torch.tensor(3, dtype=torch.int32)),
        (torch.arange(100_000), torch.arange(100_000).flip(0)),
        (np.array([1.0, 2.0]), np.array([1.0, 2.001])),
        (torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0])),
        (b"ab", b"ac"),
        ("a", "b"),
        (1, True),
        ([1, 2], [2, 1]),
        ((1, 2), [1, 2]),
        ({"x": 1}, {"x": 2}),
        (Pair(1, [torch.zeros(2)]), Pair(1, [torch.ones(2)])),
        (np.array(["a", "b"]), np.array(["a", "c"])),
    ],
)
def test_what_differs_is_not_alike(one: Any, other: Any) -> None:
    assert not alike(sketch(one), json.loads(json.dumps(sketch(other))))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 10, 50, 1_000_003])
def test_samples_are_spread_over_all_of_a_set(length: int) -> None:
    indices = spread(length)
    assert (
        indices == sorted(set(indices))
        and indices[0] == 0
        and indices[-1] == length - 1
        and len(indices) <= 8
    )
    assert len(indices) == min(length, 8) or length in (9, 10)
    assert max(np.diff(indices), default=0) <= max(1, 2 * length / 6)


class Counting:
    def __init__(self, broken: int = -1) -> None:
        self.broken = broken
        self.reads: list[int] = []  # in place: what a read sets on a data set is put back

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        if index == self.broken:
            raise OSError("cannot be read")
        return torch.rand(()), index


def test_few_samples_are_read_once_and_one_that_breaks_is_left_out() -> None:
    train, val = Counting(), Counting(broken=3)
    contents = Contents({"train": train, "val": val})
    assert train.reads == val.reads == list(range(8))
    assert "validation sample 3" not in contents.sketches and "train sample 3" in contents.sketches
    assert not Contents({"train": Counting(), "val": None}).differing(contents.sketches), (
        "draws are seeded before each"
    )
    assert contents.unstable(contents.sketches) == []


def test_iterable_data_is_not_consumed() -> None:
    contents = Contents({"train": iter(range(3)), "val": None})
    assert contents.sketches == {}


def test_weights_by_name_and_those_that_no_state_holds() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.LazyLinear(2))
    model.register_buffer("table", torch.ones(3), persistent=False)
    assert set(sketch_weights(model, all_of_it=False)) == {"table"}
    every = sketch_weights(model, all_of_it=True)
    assert {"0.weight", "1.running_mean", "2.weight", "table"} <= every.keys()
    with torch.no_grad():
        model[0].weight[1, 2] += 0.01
    after = sketch_weights(model, all_of_it=True)
    assert [name for name in every if not alike(every[name], after[name])] == ["0.weight"]


ORDER = (
    "from everstep.spec.code import fix_hash_seed; fix_hash_seed(); print(list({f'class{n}' "
    "for n in range(50)}))"
)


def test_programs_that_begin_again_list_sets_in_one_order(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}

    def listed(script: str, **more: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", script],
            env=env | more,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert (
        listed(ORDER)
        == listed(ORDER)
        == listed(ORDER, PYTHONHASHSEED="random")
        == listed(ORDER, PYTHONHASHSEED="0")
    )
    assert listed(ORDER, PYTHONHASHSEED="7") != listed(ORDER), "the operator's own seed stays"
    assert listed(
        ORDER.partition("; fix")[0] + "; print" + ORDER.partition("; print")[2]
    ) != listed(ORDER)
