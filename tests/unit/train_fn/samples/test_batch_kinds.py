"""Batches of any kind reach the device whole: what ``collate`` returns need not be a tuple, a list
or a dict."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from tests.integration.trainees import Regression
from tests.support.one_rank import journal_of
from tests.support.own_task_runs import TaskRuns
from train_fn.loop.attempt import train
from train_fn.samples.loader import tensors_in, to_device

pytestmark = pytest.mark.own_process

META = torch.device("meta")
"""Stands for a GPU: tensors move there on any machine."""


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str
    later: torch.Tensor = field(init=False)


class Graph:
    """Moves itself, as batches of PyTorch Geometric do, and takes a device alone."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:
        return Graph(self.x.to(device))


class InPlace(Graph):
    def to(self, device: torch.device) -> Any:
        self.x = self.x.to(device)


def frozen() -> Frozen:
    made = Frozen(torch.ones(2), "a")
    object.__setattr__(made, "later", torch.ones(3))
    return made


@pytest.mark.parametrize(
    ("batch", "num"),
    [
        (UserDict({"x": torch.ones(2), "n": 3}), 1),
        (OrderedDict(x=torch.ones(2), y=[torch.ones(1), "text"]), 2),
        (Pair(torch.ones(2), {"z": torch.ones(1)}), 2),
        (frozen(), 2),
        (Frozen(torch.ones(2), "a"), 1),
        (Graph(torch.ones(2)), 1),
        (InPlace(torch.ones(2)), 1),
        ((UserDict({"g": Graph(torch.ones(2))}), "text"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_tensor_of_a_batch_is_moved_and_its_kind_stays(batch: Any, num: int) -> None:
    kind = type(batch)
    moved = to_device(batch, META)
    assert type(moved) is kind
    assert [tensor.device.type for tensor in tensors_in(moved)] == ["meta"] * num
    if not isinstance(batch, InPlace):
        assert [tensor.device.type for tensor in tensors_in(batch)] == ["cpu"] * num
    assert to_device(batch, torch.device("cpu")) is batch


def test_a_packed_sequence_keeps_its_sizes_on_the_cpu() -> None:
    moved = to_device(pack_sequence([torch.ones(3), torch.ones(2)]), META)
    assert moved.data.device.type == "meta" and moved.batch_sizes.device.type == "cpu"


@dataclass
class Rows:
    x: torch.Tensor
    y: torch.Tensor
    tokens: torch.Tensor


@pytest.mark.parametrize("kind", [Rows, lambda **parts: UserDict(parts)], ids=["class", "dict"])
def test_a_task_trains_on_batches_of_such_a_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    class Own(Regression):
        def collate(self, samples: list[dict[str, torch.Tensor]]) -> Any:
            names = ("x", "y", "tokens")
            return kind(**{name: torch.stack([each[name] for each in samples]) for name in names})

        def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
            plain = batch if isinstance(batch, UserDict) else vars(batch)
            return super().loss(model, dict(plain))

    ctx = TaskRuns(tmp_path, monkeypatch).begin(Own(), train={"max_steps": 3})
    assert train(ctx) is None
    assert [point["step"] for point in journal_of(ctx).points] == [1, 2, 3]
