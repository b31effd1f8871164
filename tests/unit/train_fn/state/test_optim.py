"""Learning rates are functions of the step; optimizers decay matrices only; their states come back
bit for bit."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from everstep.spec.sections import (
    AdamSpec,
    AdamWSpec,
    ConstantScheduleSpec,
    CosineScheduleSpec,
    LinearScheduleSpec,
    OptimizerSpec,
    SgdSpec,
    StepScheduleSpec,
)
from train_fn.checks.trained import LearningRates
from train_fn.errors import BadTask
from train_fn.state.optim import (
    Optimizers,
    build_optimizer,
    drop_gradients,
    load_optimizer,
    lr_factor,
    match_layout,
    unpacked,
    with_strides,
)
from train_fn.state.tensor_tree import copy_to_cpu, tree_digest

pytestmark = pytest.mark.own_process


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
    assert lr_factor(cosine, 34, 110, 11) == pytest.approx(
        0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    )


def test_step_schedule_counts_epochs() -> None:
    spec = StepScheduleSpec(name="step", every_epochs=2, gamma=0.5)
    assert [lr_factor(spec, step, 100, 3) for step in (0, 5, 6, 11, 12)] == [1, 1, 0.5, 0.5, 0.25]


def test_a_run_shorter_than_its_warm_up_never_leaves_it() -> None:
    assert lr_factor(CosineScheduleSpec(name="cosine", warmup_steps=50), 9, 10, 5) == 0.2


@pytest.mark.parametrize(
    "spec",
    [
        AdamWSpec(weight_decay=0.1),
        AdamSpec(name="adam", weight_decay=0.1),
        SgdSpec(name="sgd", weight_decay=0.1),
    ],
)
def test_biases_and_scales_are_not_decayed(spec: OptimizerSpec) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(1, 4), nn.Linear(4, 2))
    groups = build_optimizer(spec, model).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [sorted(p.ndim for p in group["params"]) for group in groups] == [[2, 4], [1, 1, 1, 1]]


def test_set_lr_scales_each_groups_own_peak() -> None:
    optimizer = torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 1.0)]
    )
    rates = LearningRates(optimizer, "the test")
    for factor in (0.5, 0.25):
        assert rates.set(factor) == 0.1 * factor
        assert [group["lr"] for group in optimizer.param_groups] == [0.1 * factor, 1.0 * factor]


def make_layers() -> nn.Module:
    return nn.ModuleDict(
        {
            "stem": nn.Linear(2, 2),
            "blocks": nn.ModuleList(nn.Linear(2, 2) for _ in range(2)),
            "head": nn.Linear(2, 2),
        }
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
    found = [
        (sorted(names[p] for p in group["params"]), group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]
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
    spec = SgdSpec.model_validate(
        {"name": "sgd", "groups": [{"parameters": "*"}, {"parameters": "layer1.*"}]}
    )
    with pytest.raises(
        BadTask, match=r"optimizer\.groups\.1\.parameters 'layer1\.\*' .*stem\.weight"
    ):
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


def trained(optimizer_of: Any) -> torch.optim.Optimizer:
    """An optimizer after two steps over parameters of many shapes."""
    torch.manual_seed(3)
    shapes = [(), (1,), (5,), (3, 4), (0, 7), (2, 3, 3, 5)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    made: torch.optim.Optimizer = optimizer_of(
        [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:]}]
    )
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        made.step()
    return made


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["param_groups"] == wanted["param_groups"] and found.keys() == wanted.keys()
    assert list(found["state"]) == list(wanted["state"])
    for number, values in wanted["state"].items():
        assert list(found["state"][number]) == list(values)
        for name, value in values.items():
            other = found["state"][number][name]
            assert (
                other.dtype == value.dtype
                and other.shape == value.shape
                and torch.equal(other, value)
            ), (number, name)


def test_packed_moments_of_an_older_version_come_back() -> None:
    wanted = trained(lambda groups: torch.optim.AdamW(groups, lr=0.1)).state_dict()
    rows = wanted["state"]
    flat = {
        "parameters": list(rows),
        "values": {
            name: torch.cat([row[name].reshape(-1) for row in rows.values()]) for name in rows[0]
        },
        "shapes": {
            name: json.dumps([row[name].shape for row in rows.values()]) for name in rows[0]
        },
    }
    found = unpacked({"param_groups": wanted["param_groups"], "flat": flat})
    assert_same(found, wanted)
    for values in found["state"].values():
        for value in values.values():
            assert value.untyped_storage().nbytes() == value.nbytes, "it keeps no other's memory"


class Odd(torch.optim.Optimizer):
    """An optimizer of somebody else, whose state may be anything."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(1, 3), max_size=3))
    order = draw(st.permutations(range(len(shape))))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bfloat16]))
    whole = torch.arange(1, math.prod(shape) + 1).to(dtype).reshape([shape[at] for at in order])
    return whole.permute([order.index(at) for at in range(len(shape))])


VALUES = st.recursive(
    strided() | st.integers(-5, 5) | st.booleans() | st.none() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)
STATES = st.lists(st.dictionaries(st.sampled_from(["step", "m", "Q"]), VALUES), max_size=3)


def described(value: Any) -> Any:
    """What must be equal of a value, with the type, the strides and the bits of tensors."""
    if isinstance(value, torch.Tensor):
        strides = [step for step, size in zip(value.stride(), value.shape, strict=True) if size > 1]
        return str(value.dtype), strides, value.tolist()
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items()}
    return [described(each) for each in value] if isinstance(value, list) else (type(value), value)


@given(states=STATES, beside=st.dictionaries(st.sampled_from(["k", "total_step"]), VALUES))
@example(states=[{"m": torch.ones(2, 3).T}], beside={"k": torch.tensor(7), "total_step": 3})
@example(states=[{"Q": [torch.ones(2, 2, 2).permute(2, 0, 1)]}], beside={})
@pytest.mark.parametrize("several", [False, True])
def test_a_state_comes_back_with_its_bits_types_and_strides(
    several: bool, states: list[dict[str, Any]], beside: dict[str, Any]
) -> None:
    """Torch's own ``load_state_dict`` gives tensors the type of their weight."""

    def made() -> tuple[Odd, Any]:
        odd = Odd([nn.Parameter(torch.ones(2, 3)) for _ in range(3)])
        other = torch.optim.SGD([nn.Parameter(torch.ones(2))], momentum=0.9)
        return odd, Optimizers({"sgd": other, "odd": odd}) if several else odd

    odd, optimizer = made()
    odd.state.update(zip(odd.param_groups[0]["params"], states, strict=False))
    odd.state.update(beside)
    kept = copy_to_cpu(with_strides(optimizer.state_dict(), optimizer))
    again, whole = made()
    load_optimizer(whole, copy.deepcopy(kept))
    match_layout(whole, kept.get("strides"))
    assert described(again.state_dict()) == described(odd.state_dict())


def test_a_tensor_that_cannot_be_laid_out_again_is_named() -> None:
    odd = Odd([nn.Parameter(torch.ones(2, 3))])
    odd.state[odd.param_groups[0]["params"][0]] = {"Q": (torch.ones(2, 3).T,)}
    with pytest.raises(BadTask, match=r"0/Q/0 with strides .* Keep it in a list"):
        with_strides(odd.state_dict(), odd)


@pytest.mark.parametrize("use", [copy_to_cpu, tree_digest])
def test_a_tensor_that_is_made_of_others_is_named(use: Callable[[Any], object]) -> None:
    """As the moments of an 8-bit optimizer are: saved as plain tensors they would be others."""
    state = {"state": {0: {"exp_avg": TwoTensor(torch.ones(4), torch.zeros(4))}}}
    with pytest.raises(BadTask, match=r"state/0/exp_avg is a .*TwoTensor"):
        use(state)
