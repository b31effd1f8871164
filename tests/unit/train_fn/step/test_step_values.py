"""A step's value of a tensor: the weighted mean over passes, or the value after the first pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from train_fn.errors import BadTask
from train_fn.step import untrained
from train_fn.step.buffers import MovingBuffers, StepValues
from train_fn.step.peers import Peers
from train_fn.step.untrained import untrained_places

ALONE = Peers(0, 1, torch.device("cpu"))


def test_means_are_weighted_by_samples_and_firsts_are_those_of_the_first_pass() -> None:
    mean, first, count = torch.zeros(2), torch.zeros(3), torch.tensor(0)
    values = StepValues([mean, first, count], ["mean", "first", "mean"], ALONE)
    for step in range(2):  # nothing is left over from the step before
        for number, num_samples in enumerate((4, 0, 2)):
            now = [
                torch.full((2,), 10.0 * number + step),
                torch.full((3,), float(number + step)),
                torch.tensor(1 + step),
            ]
            values.add(now, num_samples, is_first=number == 0)
        values.start()
        values.wait()
        values.write_to([mean, first, count], 6)
        assert mean.tolist() == pytest.approx([40 / 6 + step] * 2)
        assert first.tolist() == [step] * 3 and count.item() == 1 + step


def test_a_first_pass_without_samples_adds_nothing_even_if_it_is_infinite() -> None:
    mean = torch.zeros(1)
    values = StepValues([mean], ["mean"], ALONE)
    values.add([torch.tensor([float("inf")])], 0, is_first=True)
    values.add([torch.tensor([3.0])], 5, is_first=False)
    values.write_to([mean], 5)
    assert mean.item() == 3.0


def test_a_late_change_of_a_tensor_without_a_copy_cannot_be_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(untrained.keep, "__defaults__", (0,))
    model = nn.Module()
    model.register_buffer("large", torch.ones(8))
    buffers = MovingBuffers(untrained_places(model, ()), (), (), ALONE, lambda moving: None)
    buffers.begin(5, 2)
    buffers.passed(3)
    model.large += 1
    with pytest.raises(BadTask, match="changed large"):
        buffers.passed(2)
    assert buffers.put_back() == ["large"]
