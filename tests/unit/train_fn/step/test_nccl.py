"""What keeps a rank alive whose peers are gone: for gloo nothing, for NCCL torch's own settings,
which a spec may change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from everstep.spec.run_spec import RunSpec
from train_fn.node.gpu_memory import memory_summary
from train_fn.recovery.environment import rank_env
from train_fn.recovery.settings import RecoverySettings
from train_fn.step import nccl
from train_fn.step.peers import Peers, end_process_group


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    end_process_group()


def test_gloos_collectives_are_left_alone(gloo: None) -> None:
    nccl.abort_collectives()
    nccl.require_whole()
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1, 1]


def test_without_a_process_group_there_is_nothing_to_abort() -> None:
    nccl.abort_collectives()
    Peers(0, 2, torch.device("cpu")).require_whole()


@pytest.mark.parametrize(
    ("env", "expected"), [({}, "2"), ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "3")]
)
def test_torch_leaves_the_process_alive_unless_the_spec_says_otherwise(
    env: dict[str, str], expected: str
) -> None:
    task = {
        "name": "image_classification",
        "model": {"name": "mini_resnet"},
        "data": {"name": "digits"},
    }
    spec = RunSpec.model_validate({"name": "a", "task": task, "env": env})
    assert rank_env(spec, RecoverySettings())["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == expected


def test_a_host_without_a_gpu_has_no_gpu_memory_to_show() -> None:
    assert memory_summary(torch.OutOfMemoryError(), torch.device("cpu")) is None
