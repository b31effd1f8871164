"""Models that ``fully_shard`` has sharded: what es.protect refuses of them, by name, and what it
keeps of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from train_fn.checks.check import Moment
from train_fn.checks.order import CallOrder, GradientsUsed, require_same_order
from train_fn.errors import BadTask, NonFiniteWeights
from train_fn.protect.arguments import LoopParts, check_torn, parts_of
from train_fn.protect.commits import Updates
from train_fn.protect.loop_state import LoopState
from train_fn.state.pieces import Piece
from train_fn.state.tensor_tree import copy_to_cpu, leaves
from train_fn.step.peers import Peers


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """This process is rank 0 of two, and nothing that it sends arrives."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))


def sharded(mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    model = network()
    return fully_shard(model, mesh=mesh or init_device_mesh("cpu", (2,)), **options)


def parts(model: nn.Module, extra: Any = None, kind: Any = torch.optim.AdamW) -> LoopParts:
    return parts_of(model, kind(model.parameters(), lr=0.1), None, extra)


def of_two_dimensions() -> nn.Module:
    return sharded(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard")))


def of_one_rank() -> nn.Module:
    return sharded(DeviceMesh("cpu", [0]))


def along_columns() -> nn.Module:
    return sharded(shard_placement_fn=lambda value: Shard(1) if value.ndim == 2 else None)


def in_part() -> nn.Module:
    model = network()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (of_two_dimensions, r"0.weight is sharded over one rank: use DistributedDataParallel"),
        (of_one_rank, r"0.weight is on ranks \[0\]: use one mesh of all 2 ranks in order"),
        (along_columns, r"0.weight has the placements .*: shard it along its first dimension"),
        (in_part, r"1.weight is trained and not sharded: apply fully_shard to the whole model"),
    ],
)
def test_models_are_refused_by_name(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(BadTask, match=message + r".*Or leave es.protect out"):
        parts(model())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (torch.optim.Adafactor, "Adafactor"),
        (torch.optim.LBFGS, "LBFGS"),
        (lambda weights, lr: torch.optim.Muon([w for w in weights if w.ndim == 2], lr), "Muon"),
    ],
)
def test_optimizers_are_refused_by_name(kind: Any, name: str) -> None:
    with pytest.raises(BadTask, match=f"is a {name}: its state cannot be cut .* Use AdamW"):
        parts(sharded(), kind=kind)


def test_a_model_that_an_evaluation_left_gathered_is_taken_as_it_is_sharded() -> None:
    model, averaged = sharded(), sharded()
    of = LoopState(parts(sharded(), {"ema": sharded()})).rows
    optimizer = torch.optim.AdamW(model.parameters())
    for each in (model, averaged):
        each(torch.ones(1, 4))
        assert not any(isinstance(value, DTensor) for value in each.parameters())
    assert LoopState(parts_of(model, optimizer, None, {"ema": averaged})).rows == of


class Averages:
    """Sharded tensors in a form that no name leads to."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        self.all = values

    def state_dict(self) -> dict[str, Any]:
        return {"all": self.all}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.all = state["all"]


def test_other_parts_are_refused_by_name() -> None:
    model = sharded()
    with pytest.raises(BadTask, match=r"extra.scaler is a GradScaler.*; use bf16 by"):
        parts(model, {"scaler": torch.amp.GradScaler("cpu")})
    with pytest.raises(
        BadTask, match=r"extra.ema/all/0 is in a list: let state_dict\(\) give dicts"
    ):
        parts(model, {"ema": Averages([*model.parameters()])})
    with pytest.raises(BadTask, match=r"has 2 optimizers: a sharded model takes one"):
        two = [torch.optim.SGD(each.parameters(), 0.1) for each in model.children()]
        parts_of(model, two, None, None)
    with pytest.raises(BadTask, match=r"is not for sharded models: .* Leave torn out"):
        check_torn("shadow", parts(model))


def test_an_optimizer_with_state_of_other_shapes_is_refused_at_the_first_commit() -> None:
    model = sharded()
    state = LoopState(parts(model))
    [optimizer] = state.parts.optimizers.values()
    optimizer.state[next(model.parameters())]["factors"] = torch.zeros(5)
    with pytest.raises(BadTask, match="keeps 'factors', which has 5 elements on each rank"):
        state.state_dict()


def trained() -> tuple[nn.Module, LoopState]:
    model = sharded()
    state = LoopState(parts(model))
    state._copies.begin()
    state.note_parts()
    for value in model.parameters():
        value.grad = torch.ones_like(value)
    [optimizer] = state.parts.optimizers.values()
    optimizer.step()
    return model, state


def test_a_piece_holds_this_rank_s_rows_and_loads_again() -> None:
    _, state = trained()
    found = copy_to_cpu(state.state_dict())
    assert found["piece"] == (0, 2) and state.piece == Piece(0, 2)
    assert found["rows"]["model/1.bias"] == 3 and found["model"] == {}
    shapes = {name: tuple(value.shape) for name, value in found["shards"].items()}
    assert shapes["model/1.weight"] == shapes["optimizer//2/exp_avg"] == (2, 6)
    assert len(shapes) == 3 * 4
    other = LoopState(parts(sharded()))
    other.load_state_dict(found)
    again = copy_to_cpu(other.state_dict())
    for (name, value), (other_name, second) in zip(leaves(found), leaves(again), strict=True):
        assert name == other_name
        assert torch.equal(value, second) if isinstance(value, torch.Tensor) else value == second


def test_a_state_of_another_kind_or_shape_is_refused() -> None:
    _, state = trained()
    found = copy_to_cpu(state.state_dict())
    with pytest.raises(BadTask, match=r"was sharded, and this one is not sharded; build it as"):
        LoopState(parts(network())).load_state_dict(found)
    whole = copy_to_cpu(LoopState(parts(network())).state_dict())
    with pytest.raises(BadTask, match="was not sharded, and this one is sharded; build it as"):
        LoopState(parts(sharded())).load_state_dict(whole)
    found["shards"]["model/1.weight"] = torch.zeros(2, 5)
    with pytest.raises(BadTask, match=r"resume differs in 1.weight; build the same model"):
        LoopState(parts(sharded())).load_state_dict(found)


def test_a_piece_with_weights_that_are_not_finite_is_not_kept() -> None:
    _, state = trained()
    found = state.state_dict()
    found["shards"]["model/0.bias"][0] = float("nan")
    with pytest.raises(NonFiniteWeights, match=r"0\.bias"):
        state.require_sound(found)


def test_a_change_of_local_rows_is_seen() -> None:
    model, state = trained()
    state.note_parts()
    assert state.changed() == []
    with torch.no_grad():
        next(model.parameters()).to_local().add_(1)
    assert state.weights_have_changed()


def test_averages_of_sharded_weights_are_part_of_a_piece() -> None:
    def averaged() -> LoopState:
        return LoopState(parts(sharded(), {"ema": sharded().requires_grad_(False)}))

    state = averaged()
    with torch.no_grad():
        for value in state.parts.others["extra.ema"].parameters():
            value.to_local().fill_(7)
    state._copies.begin()
    found = copy_to_cpu(state.state_dict())
    assert set(found["task"]["parts"]["extra.ema"].values()) == {None}
    shard = found["shards"]["extra/extra.ema/1.weight"]
    assert shard.shape == (2, 6) and found["rows"]["extra/extra.ema/1.weight"] == 3
    other = averaged()
    other.load_state_dict(found)
    assert all((v.to_local() == 7).all() for v in other.parts.others["extra.ema"].parameters())
    assert other.is_of_rank("extra.ema")
    for name in [each for each in found["shards"] if each.endswith("ema/1.bias")]:
        del found["shards"][name]
    with pytest.raises(BadTask, match=r"extra.ema of the state to resume differs in /1.bias"):
        averaged().load_state_dict(found)


def test_frozen_rows_are_part_of_a_piece_and_of_nothing_that_ranks_share() -> None:
    model = network()
    model[0].requires_grad_(False)
    model.register_buffer("count", torch.zeros(2))
    state = LoopState(parts(fully_shard(model, mesh=init_device_mesh("cpu", (2,)))))
    found = state.state_dict()
    assert {*found["model"]} == {"count"} and "model/0.weight" in found["shards"]
    before = state.digests()["the untrained count"]
    with torch.no_grad():
        model[0].weight.to_local().add_(1)
    assert state.digests()["the untrained count"] == before
    model.count += 1
    assert state.digests()["the untrained count"] != before


# ---------------------------------------------------------------- what ranks must do alike


class Layers(nn.Module):
    """Layers of one size, which torch cannot tell apart."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2,))
        self.layers = nn.ModuleList(
            fully_shard(nn.Linear(4, 4), mesh=mesh, **options) for _ in range(4)
        )
        fully_shard(self, mesh=mesh)

    def forward(self, value: torch.Tensor, *without: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            value = value if number in without else value + layer(value)
        return value


def as_ever(model: Layers) -> None:
    model(torch.ones(1, 4)).sum().backward()


def without_a_layer(model: Layers) -> None:
    model(torch.ones(1, 4), 1).sum().backward()


def without_another(model: Layers) -> None:
    model(torch.ones(1, 4), 2).sum().backward()


def gathering_ahead(model: Layers) -> None:
    model.layers[2].unshard()
    as_ever(model)


def in_another_order_backwards(model: Layers) -> None:
    model.layers[3].set_modules_to_backward_prefetch([model.layers[1]])
    as_ever(model)


def with_two_passes(model: Layers) -> None:
    loss = model(torch.ones(1, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def without_a_sum(model: Layers) -> None:
    model.set_requires_gradient_sync(False)
    as_ever(model)


def after_an_evaluation(model: Layers) -> None:
    with torch.no_grad():
        model(torch.ones(1, 4))
    as_ever(model)


def without_a_gradient(model: Layers) -> None:
    as_ever(model)
    model.layers[3].bias.grad = None


def with_a_frozen_layer(model: Layers) -> None:
    model.layers[1].requires_grad_(False)
    as_ever(model)


ALONE = Peers(0, 1, torch.device("cpu"))
STEPS = (
    as_ever,
    without_a_layer,
    without_another,
    gathering_ahead,
    in_another_order_backwards,
    with_two_passes,
    without_a_sum,
    after_an_evaluation,
    without_a_gradient,
    with_a_frozen_layer,
)


def order_of(step: Callable[[Layers], None], **options: Any) -> int:
    model = Layers(**options)
    order = CallOrder([model], ALONE)
    step(model)
    return order.take()


def test_ranks_that_meet_others_in_another_order_have_other_digests() -> None:
    orders = {step.__name__: order_of(step) for step in STEPS}
    assert len({*orders.values()}) == len(STEPS), orders
    assert orders == {step.__name__: order_of(step) for step in STEPS}
    kept = order_of(as_ever, reshard_after_forward=False)
    assert kept not in orders.values(), "its backward pass gathers nothing"
    require_same_order([kept, kept], "the loop", "now")
    with pytest.raises(BadTask, match=r"loop called other .* on rank 1 than on rank 0 now: torch"):
        require_same_order([kept, kept + 1], "the loop", "now")


def test_gathering_all_weights_looks_at_them_once_and_tells_them_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, looks, own = Layers(), [], CallOrder._memory
    monkeypatch.setattr(CallOrder, "_memory", lambda *of: looks.append(of) or own(*of))
    order, (first, second, *_) = CallOrder([model], ALONE), [each.weight for each in model.layers]

    def digest_of(*values: Any) -> int:
        for value in values:
            value.full_tensor()
        return order.take()

    assert digest_of(first, first) != digest_of(first, second) != digest_of(second, first)
    looks.clear()
    digest_of(*[*model.parameters()] * 9)
    assert len(looks) < 2 * 8 + 9 * 8, "all once, and then the one that was found"
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
    both = digest_of(first.grad, second.grad)
    first.grad.full_tensor()
    first.grad, second.grad = second.grad, first.grad
    assert digest_of(second.grad) == both != digest_of(first.grad, first.grad)


def test_another_model_of_the_process_counts_for_nothing_once_it_is_gone() -> None:
    model = Layers()
    order = CallOrder([model], ALONE)
    as_ever(Layers())
    strangers = order.take()
    assert strangers != CallOrder([model], ALONE).take(), (
        "its sums would be mixed with those of this one"
    )
    del order
    as_ever(model)


def test_gradients_that_only_fsdp_holds_are_refused_at_a_commit() -> None:
    model = Layers()
    state = LoopState(parts(model))
    check = GradientsUsed(state, Updates(may_skip=False))
    state.note_parts()
    as_ever(model)
    [optimizer] = state.parts.optimizers.values()
    optimizer.zero_grad()
    check.after(Moment.LOSS, "")
    without_a_sum(model)
    with pytest.raises(BadTask, match=r"step 1 while gradients of a sharded .* Call model.set_req"):
        check.after(Moment.LOSS, "")
