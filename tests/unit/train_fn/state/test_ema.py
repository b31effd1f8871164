"""The average of weights: by the formula, put in place for evaluation alone, whole where weights
are tied."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from train_fn.state.optim import Ema

pytestmark = pytest.mark.own_process


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


@torch.no_grad()
def change(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape))


def test_the_average_follows_the_weights_by_the_formula() -> None:
    model = make_model()
    ema, expected = Ema(model, 0.9), model[0].weight.detach().clone()
    for step in range(1, 200):
        change(model)
        ema.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model[0].weight.detach()
    torch.testing.assert_close(ema.state_dict()["0.weight"], expected)


def test_the_model_computes_with_the_average_inside_only() -> None:
    model = make_model()
    ema = Ema(model, 0.9)
    change(model)
    ema.update(1)
    own, averaged = copy.deepcopy(model.state_dict()), copy.deepcopy(ema.state_dict())
    with pytest.raises(KeyError), ema.in_place():
        assert all(torch.equal(value, averaged[name]) for name, value in model.state_dict().items())
        raise KeyError
    assert all(torch.equal(value, own[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, averaged[name]) for name, value in ema.state_dict().items())


def test_tied_weights_have_their_average_under_every_name() -> None:
    """What is saved is the model's state with averages over it, and loads in any order of names."""
    model = make_model()
    model[1].weight = model[0].weight
    ema = Ema(model, 0.9)
    change(model)
    ema.update(1)
    state = ema.state_dict()
    assert state.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
    loaded = make_model()
    loaded[1].weight = loaded[0].weight
    loaded.load_state_dict({**model.state_dict(), **state})
    assert torch.equal(loaded[0].weight, state["0.weight"])
    other = Ema(make_model(), 0.9)
    other.load_state_dict(state)
    assert torch.equal(other.state_dict()["1.weight"], state["1.weight"])
