"""Ranks whose weights differ when all of them are compared: whoever wrote the task, the states that
may be wrong are struck, and only kernels that may round differently are excused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from everstep.spec.code import CodeSpec
from storage.run_control import Distrust
from tests.support.saves import make_context
from train_fn.checks.check import Checks, Moment
from train_fn.checks.ranks import StatelessHooks, Together
from train_fn.checks.trained import TrainedParameters
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, PeerApart, RanksApart
from train_fn.node import node_dir
from train_fn.snapshots import store as snapshot_module

STEP, BEGUN_AT = 200, 40
ODD = 1
"""The rank whose weights differ, by far more than rounding explains."""


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (snapshot_module, node_dir):
        monkeypatch.setattr(module, "shared_memory_root", lambda: tmp_path)


class Peers:
    """Three ranks, one of which has other weights."""

    alone, world_size = False, 3

    def __init__(self, ranks: list[TrainedParameters]) -> None:
        self._ranks = ranks

    def gather(self, own: object) -> list[object]:
        if isinstance(own, list):
            return [each.sums() for each in self._ranks]
        if "weight" in own:
            return [each.sketches(["weight"]) for each in self._ranks]
        return [own] * 3


def compare(ctx: WorkerContext, moment: Moment, *, must_agree: bool = True) -> None:
    """Compare the weights of three ranks."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 4) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    with torch.no_grad():
        models[ODD].weight[2, 2] = 1e30
    ranks = [TrainedParameters(each, torch.optim.SGD(each.parameters(), 0.1)) for each in models]
    state = SimpleNamespace(
        model=models[0],
        step=STEP,
        begun_at=BEGUN_AT,
        num_weight_parts=1,
        frozen=None,
        unsaved=dict,
    )
    together: Any = Together
    check = together(ctx, Peers(ranks), state, ranks[0], "Mine.loss")
    check.must_agree = must_agree
    with Checks([check]).around(moment, "Mine.hook"):
        pass


@pytest.mark.parametrize("moment", [Moment.EVALUATED, Moment.LEAVING])
@pytest.mark.parametrize("code", [None, CodeSpec.model_construct()])
@pytest.mark.parametrize(("rank", "error"), [(0, PeerApart), (ODD, RanksApart)])
def test_a_high_bit_is_a_fault_of_the_node_also_beside_a_users_code(
    code: CodeSpec | None, rank: int, error: type[Exception], moment: Moment, tmp_path: Path
) -> None:
    ctx = make_context(tmp_path, rank)
    ctx = dataclasses.replace(ctx, spec=ctx.spec.model_copy(update={"code": code}))
    with pytest.raises(error, match="rank 1 differs from the others in weights weight"):
        compare(ctx, moment)
    assert ctx.run_dir.distrusted() == (Distrust(ctx.submission, ctx.attempt, STEP - 64),)


def test_right_after_a_users_hook_it_is_the_hooks_doing(tmp_path: Path) -> None:
    ctx = make_context(tmp_path)
    with pytest.raises(BadTask, match=r"Mine\.hook left different values on the ranks: weight"):
        compare(ctx, Moment.EPOCH_HOOK)
    with pytest.raises(BadTask, match=r"Mine\.loss left different values"):
        compare(ctx, Moment.EVALUATED, must_agree=False)
    assert ctx.run_dir.distrusted() == ()


@pytest.mark.parametrize(
    ("hook", "state", "named"),
    [
        (fp16_compress_hook, lambda: None, None),
        (
            powerSGD_hook,
            lambda: PowerSGDState(None, 1),
            "powerSGD_hook of the model",
        ),
        (fp16_compress_wrapper(powerSGD_hook), lambda: PowerSGDState(None, 1), "PowerSGDState"),
        (post_localSGD_hook, lambda: PostLocalSGDState(None, None, 4), "PostLocalSGDState"),
    ],
)
def test_a_communication_hook_with_a_state_is_named(
    hook: Any, state: Callable[[], Any], named: str | None
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(nn.Linear(2, 2))
        wrapped.register_comm_hook(state(), hook)
        check = StatelessHooks([nn.Sequential(wrapped)])
        if named is None:
            check.after(Moment.LOSS, "")
            return
        with pytest.raises(BadTask, match=named):
            check.after(Moment.LOSS, "")
    finally:
        dist.destroy_process_group()
