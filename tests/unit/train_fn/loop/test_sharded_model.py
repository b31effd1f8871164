"""Tasks with ``train.sharding: full``: which modules are gathered by themselves, what is refused by
name, and that ranks which call other modules are told apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import IterableDataset

from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.integration.sharded_tasks import Sharded, spec
from tests.support.one_rank import one_rank
from train_fn.context import WorkerContext
from train_fn.errors import BadTask
from train_fn.loop.sharded import (
    GatheredWeights,
    RowsAlone,
    modules_by_size,
    modules_to_shard,
    read_past_a_call,
    require_elementwise,
    require_forgotten,
    require_shardable,
    shard_model,
    shard_optimizer,
    torn_ties,
)
from train_fn.loop.step import norm_of
from train_fn.state.optim import Optimizers
from train_fn.state.pieces import Piece, weights_in
from train_fn.state.sharded import Shards
from train_fn.step.fingerprints import Fingerprints


class Gpt(nn.Module):
    """As GPT-2 is built: blocks in a list, and a head that is tied to the embedding."""

    def __init__(self, depth: int = 6, width: int = 8, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 40, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def names(model: nn.Module, chosen: list[nn.Module]) -> list[str]:
    return [name for name, each in model.named_modules() if any(each is one for one in chosen)]


def wide() -> nn.Module:
    """Most weights are in one module, and those in one layer."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 200), nn.Linear(200, 4))
    return nn.Sequential(nn.Linear(4, 4), inner)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: Gpt(6), [f"blocks.{number}" for number in range(6)]),
        (
            lambda: Gpt(4, tied=False),
            ["embedding", *[f"blocks.{number}" for number in range(4)], "head"],
        ),
        (wide, ["1.1", "1.2"]),
        (lambda: nn.Linear(4, 4), []),
        (lambda: nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8)), ["0", "1"]),
    ],
)
def test_modules_of_a_fitting_size_are_gathered_by_themselves(
    model: Callable[[], nn.Module], expected: list[str]
) -> None:
    built = model()
    assert names(built, modules_by_size(built)) == expected


def test_a_task_chooses_and_inner_modules_come_first() -> None:
    model = Gpt()
    task = Sharded()
    task.shard_modules = lambda model: [model.blocks[0], model.blocks[0][2], model]  # type: ignore[method-assign, assignment]
    assert modules_to_shard(task, model) == [model.blocks[0][2], model.blocks[0]]


def test_a_weight_that_two_gathered_modules_share_is_named() -> None:
    model = Gpt()
    assert torn_ties(model, [model.blocks[0]]) == []
    assert torn_ties(model, [model.head]) == ["head.weight"]
    model.blocks[1][0].bias = model.blocks[0][0].bias
    assert torn_ties(model, list(model.blocks)) == ["blocks.1.0.bias"]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def with_hook() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda gradient: gradient)
    return model


def with_nothing() -> nn.Module:
    model = nn.Linear(4, 4)
    model.empty = nn.Parameter(torch.empty(0, 3))
    return model


def with_scalar() -> nn.Module:
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model


@pytest.mark.parametrize(
    ("model", "val_set", "method", "message"),
    [
        (with_hook, None, None, r"put gradient hooks on weight, which a sharded weight loses"),
        (with_scalar, None, None, r"scale of .* has no dimension to shard; make it a tensor of"),
        (with_nothing, None, None, r"empty of .* has no element to shard; make it a tensor of"),
        (lambda: nn.Embedding(4, 4, sparse=True), None, None, "sparse embeddings: make them with"),
        (lambda: nn.Linear(4, 4), Stream(), None, "is iterable, so ranks could not evaluate"),
        (lambda: nn.Linear(4, 4), None, "training_step", "it would meet other ranks in the middle"),
        (lambda: nn.Linear(4, 4), None, "after_step", "it would meet other ranks in the middle"),
    ],
)
def test_tasks_are_refused_by_name(
    model: Callable[[], nn.Module], val_set: Any, method: str | None, message: str
) -> None:
    task = Sharded()
    if method is not None:
        setattr(task, method, lambda *_: None)
    with pytest.raises(BadTask, match=f"{message}.*or set train.sharding to none"):
        require_shardable(spec(), task, model(), val_set)


def test_modules_and_optimizers_are_refused_by_name() -> None:
    model, task = Gpt(), Sharded()
    for chosen, message in (
        ([nn.Linear(2, 2)], "something else than modules of the model"),
        ([model.blocks], "returned a ModuleList, which is never called itself"),
    ):
        task.shard_modules = lambda model, chosen=chosen: chosen  # type: ignore[method-assign, misc]
        with pytest.raises(BadTask, match=message):
            modules_to_shard(task, model)
    one = torch.optim.SGD(model.parameters())
    require_elementwise(one, "it")
    for optimizer in (torch.optim.Adafactor(model.parameters()), Optimizers({"a": one})):
        with pytest.raises(BadTask, match=f"it is of the class {type(optimizer).__name__}, whose"):
            require_elementwise(optimizer, "it")


class Norms(torch.optim.SGD):
    """As optimizers that scale each weight by its norm, which some rows do not tell."""


def with_hooks(weights: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(weights)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Norms, "is of the class Norms, and .* lets it see some rows of each weight only"),
        (torch.optim.Adagrad, "is of the class Adagrad, and .* Use one of torch's Adadelta, Adam,"),
        (with_hooks, "has hooks of its step, and .* lets them see some rows"),
    ],
)
def test_an_optimizer_that_must_see_more_than_rows_is_refused(
    optimizer: Callable[[Any], torch.optim.Optimizer], message: str, tmp_path: Path
) -> None:
    ctx, model = one_rank(spec(), RunDir(open_storage(str(tmp_path)), "run_test")), Gpt()
    with pytest.raises(BadTask, match=f"it {message}.*or set train.sharding to none"):
        shard_optimizer(ctx, Sharded(), model, optimizer(model.parameters()), "it")
    used = torch.optim.SGD(model.parameters(), momentum=0.9)
    model.embedding.weight.grad = torch.ones_like(model.embedding.weight)
    used.step()
    with pytest.raises(BadTask, match="it has a state already, of whole weights"):
        shard_optimizer(ctx, Sharded(), model, used, "it")


# ---------------------------------------------------------------- rank 0 of two


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[WorkerContext]:
    """This process is rank 0 of two, and nothing that it sends arrives."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    ctx = one_rank(spec(), RunDir(open_storage(str(tmp_path)), "run_test"))
    yield replace(ctx, world_size=2)
    dist.destroy_process_group()
    # DTensor takes two meshes of the same ranks for equal, also of groups that have ended.
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


Shard = Callable[[nn.Module], Shards]


@pytest.fixture
def shard(two_ranks: WorkerContext) -> Shard:
    """Return a function that shards a model."""
    task = Sharded()
    task.shard_modules = lambda model: [  # type: ignore[method-assign]
        each for name, each in model.named_children() if name in ("inner", "last", "0")
    ]
    return lambda model: shard_model(two_ranks, task, model, None)


@pytest.fixture
def shards(shard: Shard) -> Shards:
    return shard(Sharded().build_model())


@pytest.mark.parametrize("fused", [False, True])
def test_a_sharded_optimizer_updates_its_rows_alone(two_ranks: WorkerContext, fused: bool) -> None:
    """Weights in the order of channels_last as well, and moments that were saved and loaded."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 5, 2), nn.Linear(2, 1)).to(memory_format=torch.channels_last)
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(each.parameters(), fused=fused) for each in (plain, model)]
    shards = shard_optimizer(two_ranks, Sharded(), model, optimizers[1], "it")
    for _ in range(3):
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        optimizers[0].step()
        with shards._rows_alone(optimizers[1]):
            optimizers[1].step()
        state = {"model": model.state_dict(), "optimizer": optimizers[1].state_dict()}
        state["ema"] = {name: value + 1 for name, value in model.named_parameters()}
        averages = state["ema"]["0.weight"].clone()
        found = shards.apart(state, optimizers[1])
        saved = copy.deepcopy(found)
        torch.testing.assert_close(found["shards"]["ema/0.weight"], averages[:3])
        for value in found["shards"].values():
            value.zero_()
        shards._gather = lambda weights: None  # type: ignore[method-assign]
        shards.load(optimizers[1], saved)
    assert found["model"] == {} and found["ema"] is None
    assert found["rows"]["model/0.weight"] == found["rows"]["ema/0.weight"] == 5
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        rows = -(-len(one) // 2)
        torch.testing.assert_close(other[:rows], one[:rows])
        assert len(one) == 1 or not torch.allclose(other, one)
        moment = optimizers[1].state[other]["exp_avg"]
        torch.testing.assert_close(moment, optimizers[0].state[one]["exp_avg"][:rows])
        assert moment.stride() == other[:rows].stride()


def test_a_model_is_sharded_with_its_tied_and_frozen_weights(shards: Shards) -> None:
    assert shards.piece == Piece(0, 2)
    rows = {name.removeprefix("model/"): count for name, count in shards.rows.items()}
    assert rows["last.weight"] == 1 and rows["inner.0.bias"] == rows["two.weight"] == 30
    assert len(shards.trained) == 9


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_of_gathered_modules_the_forward_passes_alone_are_compiled(
    two_ranks: WorkerContext,
) -> None:
    """What gathers their weights, and what looks at it, stays around them."""
    model = Sharded().build_model()
    shard_model(replace(two_ranks, spec=spec(compile=True)), Sharded(), model, None)
    found = [
        name
        for name, each in model.named_modules()
        if hasattr(each.forward, "_torchdynamo_orig_callable")
    ]
    assert found == ["inner", "last"]


def test_digests_and_norms_are_those_of_rows_and_add_up(shards: Shards) -> None:
    whole, parts = torch.arange(12.0).reshape(6, 2), torch.arange(12.0).reshape(6, 2).split(3)
    assert norm_of([whole]) == pytest.approx(
        sum(norm_of([part, torch.empty(0)]) ** 2 for part in parts) ** 0.5
    )
    assert norm_of([]) == 0.0
    for value in shards.trained:
        value.grad = torch.ones_like(value)
    own = Fingerprints(shards.trained)
    own.start(0)
    own.finish()
    gradient, weights = own.gradient, own.weights
    assert gradient and weights
    own.combine([(gradient, weights), (1, 2)])
    own.finish()
    assert (own.gradient, own.weights) == (gradient + 1, weights + 2)


def test_weights_in_a_state_are_those_of_its_piece() -> None:
    state = {"model": {"mean": torch.ones(1)}, "shards": None}
    assert weights_in(state) == state["model"]
    rows = {"model/last.weight": torch.zeros(1), "optimizer//0/exp_avg": torch.zeros(1)}
    assert [*weights_in(state | {"shards": rows})] == ["mean", "last.weight"]


class Cloning(nn.Linear):
    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        found = super().state_dict(*arguments, **named)
        return {name: value.detach().clone() for name, value in found.items()}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: nn.Sequential(nn.Identity(), nn.Linear(4, 4), nn.Linear(4, 4).double()),
            r"the model of .* trains weights of torch.float32 and torch.float64, which are",
        ),
        (lambda: Cloning(4, 4), r"state_dict\(\) of .* returns copies of weight, bias, and a"),
    ],
)
def test_models_are_refused_once_they_are_sharded(
    model: Callable[[], nn.Module], message: str, shard: Shard
) -> None:
    with pytest.raises(BadTask, match=f"{message}.*or set train.sharding to none"):
        shard(model())


def test_weights_in_another_order_of_memory_are_sharded(shard: Shard) -> None:
    model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = model.weight.detach().clone()
    assert not before.is_contiguous()
    shard(model)
    assert torch.equal(model.weight.to_local(), before[:2])


def test_an_optimizer_is_built_under_the_classes_of_the_task(shards: Shards) -> None:
    inner = shards.units[1]
    assert type(inner) is not nn.Sequential and isinstance(inner, nn.Sequential)
    with shards.under_own_classes():
        assert type(inner) is nn.Sequential
    assert type(inner) is not nn.Sequential


def test_weights_that_are_kept_beside_a_sharded_model_are_named(shard: Shard) -> None:
    """In an attribute of the task, say: nothing would train them."""
    model = Sharded().build_model()
    kept: list[Any] = [model.last.weight, model.inner[0].bias.detach()]
    held = shard(model)
    with pytest.raises(BadTask, match=r"keeps inner.0.bias, last.weight beside the model"):
        require_forgotten(held, Sharded())
    kept.clear()
    require_forgotten(held, Sharded())


def test_what_a_first_pass_writes_into_weights_is_refused(shards: Shards) -> None:
    model = shards.units[0]

    def run(change: Callable[[], Any] = lambda: None) -> None:
        watch = GatheredWeights(shards)
        with watch.watched("loss"):
            model(torch.ones(3, 4))
            change()
        assert watch.were_all_called

    run()
    for name, change in (
        ("one.weight", lambda: model.one.weight.data.mul_(0.5)),  # gathered still
        ("inner.0.weight", lambda: model.inner[0].weight.data.mul_(0.5)),  # rows
    ):
        with pytest.raises(BadTask, match=f"writes into weights of a sharded model: {name}"):
            run(change)

    def fill(norm: Any, *_: Any) -> None:
        norm.weight.data.fill_(2.0)

    handle = model.inner[1].register_forward_hook(fill)
    with pytest.raises(BadTask, match=r"writes into weights of a sharded model: inner.1.weight"):
        run()
    handle.remove()
    run()


@torch.no_grad()
def test_rows_that_are_taken_for_a_whole_weight_are_refused(shards: Shards) -> None:
    weight = shards.units[1][0].weight
    for code, message in (
        (lambda: weight[0].zero_(), "writes into a part of a sharded weight"),
        (lambda: weight[0].view(2, 2)[1].zero_(), "writes into a part of a sharded weight"),
        (lambda: float(weight.norm()), "reads a number of a sharded tensor"),
    ):
        with pytest.raises(BadTask, match=f"hook {message}"), RowsAlone("hook"):
            code()
    before = weight.to_local().clone()
    with RowsAlone("hook"):
        weight[:, 0].zero_()  # of all rows
        weight.mul_(2.0)
        weight.clone().zero_()
    assert torch.equal(weight.to_local()[:, 1:], 2 * before[:, 1:])
    assert not weight.to_local()[:, 0].any() and shards.replaced() == []
    weight.data = torch.zeros(30, 4)
    assert shards.replaced() == ["inner.0.weight"]


def test_errors_of_torch_are_named() -> None:
    for text, words in (
        ("got mixed torch.Tensor and DTensor", "uses weights of a sharded module without calling"),
        ("out of bounds for storage of size 0", "needs weights of a sharded module that are not"),
    ):
        assert words in str(read_past_a_call(RuntimeError(text), Sharded()))
    assert read_past_a_call(RuntimeError("out of memory"), Sharded()) is None
