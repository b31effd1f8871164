"""What goes wrong on GPUs: memory that is too small says who held it, and an aborted communicator
lets nobody believe its sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from everstep.wire import ErrorKind
from train_fn.errors import PeersGone
from train_fn.node.memory import memory_summary
from train_fn.recovery.evidence import describe_error, kind_of
from train_fn.step import nccl as nccl_abort


def test_out_of_memory_is_a_verdict_with_who_held_it(nccl: torch.device) -> None:
    held = torch.empty(64 << 20, dtype=torch.uint8, device=nccl)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device=nccl)
    assert kind_of(caught.value) is ErrorKind.DEVICE_MEMORY
    summary = memory_summary(caught.value, nccl)
    assert summary is not None
    assert "cuda:0" in summary.splitlines()[0]
    assert "Allocated memory" in summary
    assert memory_summary(ValueError(), nccl) is None
    del held


def test_an_aborted_communicator_is_noticed_and_is_nobodys_fault(nccl: torch.device) -> None:
    nccl_abort.begin_attempt()
    tensor = torch.ones(1000, device=nccl)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    nccl_abort.require_whole()
    nccl_abort.abort_collectives()
    with pytest.raises(PeersGone) as caught:
        nccl_abort.require_whole()
    assert describe_error(caught.value, 0).collateral
    nccl_abort.begin_attempt()


def test_two_ranks_share_one_gpu_over_gloo(tmp_path: Path) -> None:
    """NCCL refuses two ranks on one device; gloo adds CUDA tensors up through the host."""
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add_up, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]


def _add_up(rank: int, directory: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2
    )
    model = torch.nn.Linear(4, 1, bias=False).cuda()
    torch.nn.init.zeros_(model.weight)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped(torch.full((1, 4), float(rank + 1), device="cuda")).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.flatten().tolist() == [1.5] * 4
    dist.destroy_process_group()
