"""Weights that an evaluation has swapped are not left as those of the last step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from train_fn.protect.arguments import parts_of
from train_fn.protect.loop_state import LoopState


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)


def through_data(model: nn.Module) -> None:
    for value in model.parameters():
        value.data.copy_(value.data * 0.5)


def by_pointer(model: nn.Module) -> None:
    for value in model.parameters():
        value.data = value.data * 0.5


@pytest.mark.parametrize("swap", [in_place, through_data, by_pointer])
def test_swapped_weights_are_not_those_of_the_commit(swap: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = LoopState(parts_of(model, optimizer, None, None))
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    state.count_step(None)
    state.note_parts()
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().mean().backward()
    assert isinstance(state.last_committed(), dict)
    swap(model)
    assert state.last_committed() == ["the trained weights"]
    state.count_step(None)
    state.note_parts()
    assert isinstance(state.last_committed(), dict)
