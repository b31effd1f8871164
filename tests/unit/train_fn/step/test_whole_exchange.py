"""An exchange of gradients that a backward does not complete: whose fault it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from train_fn.errors import BadTask
from train_fn.loop.replica import wrap
from train_fn.state.trained_parameters import TrainedParameters
from train_fn.step.peers import end_process_group
from train_fn.step.whole_exchange import finish_exchange

pytestmark = pytest.mark.own_process


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    end_process_group()


@pytest.mark.parametrize("frozen_after", [0, 1])
def test_a_layer_that_is_frozen_within_a_step_is_refused_by_name_before_the_commit(
    frozen_after: int,
) -> None:
    """Also where an earlier micro-batch of the step has given it a gradient."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained, wrapped = TrainedParameters(model, optimizer), wrap(model, torch.device("cpu"))
    exchanged = list(model.parameters())

    def whole_step(num_passes: int, frozen_after: int | None = None) -> None:
        for position in range(num_passes - 1):
            if position == frozen_after:
                model[1].requires_grad_(False)
            with wrapped.no_sync():
                wrapped(torch.ones(2, 3)).sum().backward()
        if frozen_after == num_passes - 1:
            model[1].requires_grad_(False)
        wrapped(torch.ones(2, 3)).sum().backward()
        finish_exchange(wrapped, exchanged, 7, trained.check_flags)

    whole_step(2)
    with pytest.raises(BadTask, match=r"requires_grad of 1\.weight, 1\.bias became False"):
        whole_step(2, frozen_after)
