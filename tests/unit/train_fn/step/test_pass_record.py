"""The digests of one pass: every bit counts, and nothing of the pass is changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from train_fn.checks.audit import flip_low_bit
from train_fn.step.fingerprints import Computed, PassRecord


class Pass(nn.Module):
    """Computes (loss sum, weight), as a step's module does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, 4, sparse=True)
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.net(self.words(batch)).square().sum(), len(batch)


BATCH = torch.tensor([1, 5, 2, 5])


def recorded(
    change: Callable[[Pass], object] = lambda made: None, batch: torch.Tensor = BATCH
) -> Computed:
    made = Pass()
    change(made)
    buffers = [made.net[1].running_mean, made.net[1].running_var]
    record = PassRecord(made, list(made.parameters()), lambda: buffers)  # type: ignore[arg-type]
    with record:
        made(batch)[0].backward()
    return record.computed()


@pytest.mark.parametrize("place", range(7))
def test_one_flipped_bit_of_any_gradient_changes_only_its_digest(place: int) -> None:
    def flipped(gradient: torch.Tensor) -> torch.Tensor:
        wrong = gradient.detach().clone()
        flip_low_bit(wrong._values() if wrong.is_sparse else wrong)
        return wrong

    found = recorded(lambda made: list(made.parameters())[place].register_hook(flipped))
    assert recorded() == recorded()
    assert recorded().differing(found) == ["its gradient"]


def test_samples_loss_and_buffers_count() -> None:
    other = recorded(batch=torch.tensor([1, 5, 2, 6]))
    assert recorded().differing(other) == [
        "its samples",
        "its loss",
        "its gradient",
        "what its forward pass changes",
    ]

    def moved(made: Pass) -> None:
        with torch.no_grad():
            made.net[1].running_var[1] += 1e-6

    assert recorded().differing(recorded(moved)) == ["what its forward pass changes"]


def test_gradients_are_those_of_the_pass_alone_and_nothing_stays_behind() -> None:
    made = Pass()
    parameters = list(made.net.parameters())

    def one() -> Computed:
        with PassRecord(made, parameters, list) as record:
            made(BATCH)[0].backward()
        return record.computed()

    first, second = one(), one()
    assert first == second, "added to the gradients of the first pass"
    with PassRecord(made, parameters, list) as record:
        made(BATCH)[0].backward()
    made(BATCH.flip(0))[0].backward()
    assert record.computed() == first, "the hooks are gone"
