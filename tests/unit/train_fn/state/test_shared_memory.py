"""An optimizer takes over a restored state's memory where nothing can tell, and only there."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from train_fn.snapshots.state_file import read_state, write_state
from train_fn.state.tensor_tree import copy_to_cpu, owned
from train_fn.state.train_state import TrainState

LARGE = 1 << 19
"""Elements of the model's weight."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, LARGE)


def state_of(model: nn.Module) -> TrainState:
    return TrainState(
        model,
        torch.optim.AdamW(model.parameters()),
        torch.amp.GradScaler("cpu"),
        None,
        steps_per_epoch=4,
        fingerprint="data",
    )


def test_an_optimizer_takes_moments_over_that_have_memory_of_their_own(tmp_path: Path) -> None:
    """Not those of a mapped file, whose pages each step would copy, nor parts of larger memory."""
    large, part = torch.ones(LARGE), torch.ones(2, 3)
    state = {**state_of(Model()).state_dict(), "task": [large.clone()]}
    write_state(path := tmp_path / "state", state)
    mapped = read_state(path)[0]["task"][0]
    taken = owned({"own": large, "part": part[0], "mapped": mapped, "step": 3})
    assert taken["own"] is large and taken["step"] == 3
    assert torch.equal(taken["part"], part[0]) and torch.equal(taken["mapped"], mapped)
    memory = {part.data_ptr(), mapped.data_ptr()}
    assert not memory & {taken["part"].data_ptr(), taken["mapped"].data_ptr()}

    left = state_of(Model())
    left.model.head(torch.ones(1, left.model.head.in_features)).sum().backward()
    left.optimizer.step()
    found = copy_to_cpu(left.state_dict(packed=False))
    moments = {each.data_ptr() for each in found["optimizer"]["state"][0].values()}
    for gives_memory in (False, True):
        other = state_of(Model())
        other.load_state_dict(found, gives_memory=gives_memory)
        [own] = [other.optimizer.state[each] for each in other.model.head.parameters()][:1]
        assert bool({each.data_ptr() for each in own.values()} & moments) == gives_memory
