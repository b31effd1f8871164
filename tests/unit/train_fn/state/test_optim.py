"""Learning rates are functions of the step; optimizers decay matrices only; what was packed comes
back bit for bit."""

from __future__ import annotations

import copy
import io
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
from tests.unit.train_fn.state.test_state import through_a_file
from train_fn.checks.trained import LearningRates
from train_fn.errors import BadTask
from train_fn.state.optim import (
    Optimizers,
    Packer,
    build_optimizer,
    drop_gradients,
    lr_factor,
    match_layout,
    unpacked,
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


def trained(
    optimizer_of: Any, *, dtype: torch.dtype = torch.float32, idle: bool = False
) -> torch.optim.Optimizer:
    """An optimizer after two steps over parameters of many shapes; the last one has no gradient
    where it is to be idle."""
    torch.manual_seed(3)
    shapes = [(), (1,), (5,), (3, 4), (0, 7), (2, 3, 3, 5)]
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    parameters[-1].data = parameters[-1].data.to(memory_format=torch.channels_last)
    made: torch.optim.Optimizer = optimizer_of(
        [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:]}]
    )
    for _ in range(2):
        for parameter in parameters[: -1 if idle else None]:
            parameter.grad = torch.randn_like(parameter)
        made.step()
    return made


def packed(state: dict[str, Any]) -> dict[str, Any]:
    """By one who sees this optimizer for the first time."""
    return Packer().packed(state)


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


KINDS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.1),
    "adadelta": lambda groups: torch.optim.Adadelta(groups, lr=0.1),
}


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_few_tensors_and_come_back_bit_for_bit(
    kind: str, dtype: torch.dtype, idle: bool
) -> None:
    optimizer = trained(KINDS[kind], dtype=dtype, idle=idle)
    wanted = optimizer.state_dict()
    made = packed(wanted)
    assert "state" not in made and len(made["flat"]["values"]) == len(
        next(iter(wanted["state"].values()))
    )
    before = copy.deepcopy(wanted)
    loaded = unpacked(through_a_file(made))
    assert_same(loaded, before)
    for values in loaded["state"].values():
        for value in values.values():
            assert value.untyped_storage().nbytes() == value.nbytes, "it keeps no other's memory"
    other = trained(KINDS[kind], dtype=dtype, idle=idle)
    other.load_state_dict(loaded)
    assert_same(other.state_dict(), before)


def test_what_was_packed_is_a_copy() -> None:
    optimizer = trained(KINDS["adamw"])
    made = packed(optimizer.state_dict())
    before = copy.deepcopy(made)
    optimizer.step()
    assert all(
        torch.equal(value, before["flat"]["values"][name])
        for name, value in made["flat"]["values"].items()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_packed_as_they_are_now_also_by_who_knows_the_optimizer(kind: str) -> None:
    optimizer, packer = trained(KINDS[kind]), Packer()
    first = packer.packed(optimizer.state_dict())
    for _ in range(3):
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        made = packer.packed(optimizer.state_dict())
        assert all(
            made["flat"]["values"][name] is value for name, value in first["flat"]["values"].items()
        ), "in the same memory"
        assert_same(unpacked(made), optimizer.state_dict())


def replaced(state: dict[str, Any]) -> None:
    state["state"][2]["exp_avg"] = torch.randn(5)


def resized(state: dict[str, Any]) -> None:
    state["state"][2]["exp_avg"].data = torch.randn(1)


def retyped(state: dict[str, Any]) -> None:
    for values in state["state"].values():
        values["exp_avg"].data = values["exp_avg"].double() / 3


def renamed(state: dict[str, Any]) -> None:
    for number, values in state["state"].items():
        state["state"][number] = {
            ("other" if name == "exp_avg" else name): value for name, value in values.items()
        }


def swapped(state: dict[str, Any]) -> None:
    values = state["state"]
    values[4], values[5] = values.pop(5), values.pop(4)


def dropped(state: dict[str, Any]) -> None:
    del state["state"][1]


@pytest.mark.parametrize("change", [replaced, resized, retyped, renamed, swapped, dropped])
def test_who_knows_the_optimizer_sees_that_its_values_are_others(change: Any) -> None:
    state, packer = trained(KINDS["adamw"]).state_dict(), Packer()
    packer.packed(state)
    change(state)
    assert_same(unpacked(packer.packed(state)), state)


class Odd(torch.Tensor):
    """Not torch's own class."""


OTHERS: dict[str, Any] = {
    "list": [1.0, 2.0],
    "number": 7,
    "none": None,
    "integers": torch.zeros(3, dtype=torch.uint8),
    "complex": torch.zeros(3, dtype=torch.complex64),
    "double": torch.zeros(3, dtype=torch.float64),
    "elsewhere": torch.zeros(3, device="meta"),
    "sparse": torch.eye(3).to_sparse(),
    "wants grad": torch.zeros(3, requires_grad=True),
    "parameter": nn.Parameter(torch.zeros(3)),
    "subclass": torch.zeros(3).as_subclass(Odd),
}


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_fit_one_flat_tensor_is_left_as_it_is(name: str, everywhere: bool) -> None:
    values: dict[int, dict[str, Any]] = {
        number: {"a": torch.ones(2), "b": torch.ones(3)} for number in range(3)
    }
    for number in range(3) if everywhere else [1]:
        values[number]["b"] = OTHERS[name]
    state = {"state": values, "param_groups": []}
    made = packed(state)
    if everywhere and name in ("double", "elsewhere"):
        assert "flat" in made, "these are alike"
    else:
        assert made is state and unpacked(made) is state


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
def test_a_state_comes_back_as_from_torch_s_own_save_and_load(
    several: bool, states: list[dict[str, Any]], beside: dict[str, Any]
) -> None:
    def made() -> tuple[Odd, Any]:
        odd = Odd([nn.Parameter(torch.ones(2, 3)) for _ in range(3)])
        other = torch.optim.SGD([nn.Parameter(torch.ones(2))], momentum=0.9)
        return odd, Optimizers({"sgd": other, "odd": odd}) if several else odd

    odd, optimizer = made()
    odd.state.update(zip(odd.param_groups[0]["params"], states, strict=False))
    odd.state.update(beside)
    by_torch, _ = made()
    saved = io.BytesIO()
    torch.save(odd.state_dict(), saved)
    saved.seek(0)
    by_torch.load_state_dict(torch.load(saved, weights_only=True))

    kept = copy_to_cpu(Packer().packed(optimizer.state_dict(), optimizer))
    again, whole = made()
    whole.load_state_dict(unpacked(copy.deepcopy(kept)))
    match_layout(whole, kept.get("strides"))
    assert described(again.state_dict()) == described(by_torch.state_dict())


def test_a_tensor_that_cannot_be_laid_out_again_is_named() -> None:
    odd = Odd([nn.Parameter(torch.ones(2, 3))])
    odd.state[odd.param_groups[0]["params"][0]] = {"Q": (torch.ones(2, 3).T,)}
    with pytest.raises(BadTask, match=r"0/Q/0 with strides .* Keep it in a list"):
        Packer().packed(odd.state_dict(), odd)


@pytest.mark.parametrize("use", [copy_to_cpu, tree_digest])
def test_a_tensor_that_is_made_of_others_is_named(use: Callable[[Any], object]) -> None:
    """As the moments of an 8-bit optimizer are: saved as plain tensors they would be others."""
    state = {"state": {0: {"exp_avg": TwoTensor(torch.ones(4), torch.zeros(4))}}}
    with pytest.raises(BadTask, match=r"state/0/exp_avg is a .*TwoTensor"):
        use(state)
