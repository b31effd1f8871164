"""Learning rates are functions of the step; optimizers decay matrices only."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from everstep.catalog import (
    AdamSpec,
    AdamWSpec,
    ConstantScheduleSpec,
    CosineScheduleSpec,
    LinearScheduleSpec,
    OptimizerSpec,
    SgdSpec,
    StepScheduleSpec,
)
from train_fn.errors import BadTask
from train_fn.optim import build_optimizer, drop_gradients, lr_factor, set_lr


def test_warm_up_rises_to_the_peak() -> None:
    spec = ConstantScheduleSpec(warmup_steps=4)
    assert [lr_factor(spec, step, 10, 5) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_and_linear_end_on_their_final_fraction() -> None:
    cosine = CosineScheduleSpec(name="cosine", warmup_steps=10, final_fraction=0.1)
    linear = LinearScheduleSpec(name="linear", warmup_steps=10, final_fraction=0.1)
    for spec in (cosine, linear):
        factors = [lr_factor(spec, step, 110, 11) for step in range(110)]
        assert max(factors) == factors[9] == 1.0
        assert factors[9:] == sorted(factors[9:], reverse=True)
        assert factors[59] == pytest.approx(0.55)  # halfway
        assert factors[-1] == pytest.approx(0.1)
    assert lr_factor(cosine, 34, 110, 11) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_step_schedule_counts_epochs() -> None:
    spec = StepScheduleSpec(name="step", every_epochs=2, gamma=0.5)
    assert [lr_factor(spec, step, 100, 3) for step in (0, 5, 6, 11, 12)] == [1, 1, 0.5, 0.5, 0.25]


def test_a_run_shorter_than_its_warm_up_never_leaves_it() -> None:
    assert lr_factor(CosineScheduleSpec(name="cosine", warmup_steps=50), 9, 10, 5) == 0.2


@pytest.mark.parametrize(
    "spec", [AdamWSpec(weight_decay=0.1), AdamSpec(name="adam", weight_decay=0.1), SgdSpec(name="sgd", weight_decay=0.1)]
)
def test_biases_and_scales_are_not_decayed(spec: OptimizerSpec) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(1, 4), nn.Linear(4, 2))
    groups = build_optimizer(spec, model).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [sorted(p.ndim for p in group["params"]) for group in groups] == [[2, 4], [1, 1, 1, 1]]


def test_set_lr_scales_each_groups_own_peak() -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 1.0)])
    for factor in (0.5, 0.25):
        set_lr(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1 * factor, 1.0 * factor]


def make_layers() -> nn.Module:
    return nn.ModuleDict(
        {"stem": nn.Linear(2, 2), "blocks": nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), "head": nn.Linear(2, 2)}
    )


def test_layers_have_learning_rates_of_their_own() -> None:
    groups = [
        {"parameters": "blocks.0.*", "lr_scale": 0.5},
        {"parameters": "*.bias", "weight_decay": 0.3},
        {"parameters": "stem.*", "lr_scale": 0.0},
    ]
    spec = AdamWSpec.model_validate({"lr": 0.1, "weight_decay": 0.2, "groups": groups})
    model = make_layers()
    optimizer = build_optimizer(spec, model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = [(sorted(names[p] for p in group["params"]), group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [
        (["blocks.1.weight", "head.weight"], 0.1, 0.2),
        (["blocks.0.weight"], 0.05, 0.2),
        (["blocks.0.bias"], 0.05, 0.0),
        (["blocks.1.bias", "head.bias", "stem.bias"], 0.1, 0.3),
        (["stem.weight"], 0.0, 0.2),
    ]
    before = model["stem"].weight.detach().clone()  # type: ignore[index, operator, union-attr]
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert torch.equal(model["stem"].weight, before)  # type: ignore[index, union-attr]


def test_a_pattern_without_parameters_is_named() -> None:
    spec = SgdSpec.model_validate({"name": "sgd", "groups": [{"parameters": "*"}, {"parameters": "layer1.*"}]})
    with pytest.raises(BadTask, match=r"optimizer\.groups\.1\.parameters 'layer1\.\*' .*stem\.weight"):
        build_optimizer(spec, make_layers())


def test_gradients_are_dropped_as_the_optimizer_would() -> None:
    class Own(torch.optim.SGD):
        num_drops = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.num_drops += 1
            super().zero_grad(set_to_none)

    for make in (torch.optim.SGD, Own):
        layer, beside = nn.Linear(2, 2), nn.Parameter(torch.ones(()))
        optimizer = make([{"params": layer.parameters()}, {"params": [beside]}], lr=0.1)
        (layer(torch.ones(2)).sum() * beside).backward()
        assert all(parameter.grad is not None for parameter in (*layer.parameters(), beside))
        drop_gradients(optimizer)
        assert all(parameter.grad is None for parameter in (*layer.parameters(), beside))
    assert isinstance(optimizer, Own) and optimizer.num_drops == 1
