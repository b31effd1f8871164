"""An exchange of gradients that a backward does not complete: whose fault it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from train_fn.checks.trained import TrainedParameters
from train_fn.errors import BadTask, StepNotWhole
from train_fn.loop.passes import wrap
from train_fn.step.peers import end_process_group, fill_gradients, finish_exchange

pytestmark = pytest.mark.own_process

ONES = torch.ones(2, 3)


class Branches(nn.Module):
    """Two layers that a pass uses together, or the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        return self.first(x) + self.second(x) if both else self.first(x)


def nothing_changed() -> None:
    """Stand for a check of flags that finds nothing."""


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


@pytest.mark.parametrize("earlier", [False, True])
def test_a_layer_that_the_last_pass_left_out_takes_part_with_what_earlier_passes_gave_it(
    earlier: bool,
) -> None:
    model = Branches()
    wrapped, exchanged = wrap(model, torch.device("cpu")), list(model.parameters())
    wrapped(ONES, both=True).sum().backward()
    finish_exchange(wrapped, exchanged, 0, nothing_changed)
    for number in range(3):
        model.zero_grad(set_to_none=False)
        with wrapped.no_sync():
            wrapped(ONES, both=earlier).sum().backward()
        wrapped(ONES, both=False).sum().backward()
        with pytest.raises(RuntimeError, match="finished reduction"):
            wrapped.reducer._check_reducer_finalized()
        finish_exchange(wrapped, exchanged, number, nothing_changed)
        wrapped.reducer._check_reducer_finalized()
        assert model.first.weight.grad is not None and model.second.weight.grad is not None
        assert model.first.weight.grad.tolist() == [[4.0, 4.0, 4.0]]
        assert model.second.weight.grad.tolist() == [[2.0 * earlier] * 3]


def half_a_step(model: nn.Module) -> tuple[nn.parallel.DistributedDataParallel, list[nn.Parameter]]:
    """A step whose last pass left the second layer out; what DDP exchanges."""
    wrapped = wrap(model, torch.device("cpu"))
    wrapped(ONES, both=False).sum().backward()
    return wrapped, list(model.parameters())


def test_an_exchange_that_stays_incomplete_is_refused() -> None:
    """Were these not the parameters that DDP numbers, others would take part."""
    wrapped, exchanged = half_a_step(Branches())
    others = [nn.Parameter(torch.zeros(1)) for _ in exchanged]
    with pytest.raises(StepNotWhole, match=r"step 8.*finished reduction"):
        finish_exchange(wrapped, others, 7, nothing_changed)


def test_a_parameter_that_nothing_can_reach_is_no_whole_step() -> None:
    model = Branches()
    wrapped, exchanged = half_a_step(model)
    model.second.requires_grad_(False)
    with pytest.raises(StepNotWhole, match=r"(?s)step 8.*did not receive grad"):
        finish_exchange(wrapped, exchanged, 7, nothing_changed)


def test_without_an_exchange_a_parameter_that_no_pass_used_has_a_gradient_of_zero() -> None:
    model = Branches()
    model(ONES, both=False).sum().backward()
    fill_gradients(model.parameters())
    assert model.first.weight.grad is not None and model.second.weight.grad is not None
    assert model.first.weight.grad.tolist() == [[2.0, 2.0, 2.0]]
    assert model.second.weight.grad.tolist() == [[0.0, 0.0, 0.0]]
