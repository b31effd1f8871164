"""How a rank leaves the others: whatever it is still in must neither hold it up nor leave them
waiting."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch
import torch.distributed as dist

from train_fn.step.peers import end_process_group

DEADLINE_S = 60.0


def leave_a_sum(rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=2)
    dist.all_reduce(torch.ones(1000), async_op=True)
    end_process_group()


def wait_for_a_message(rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=1, world_size=2)
    try:
        dist.recv(torch.empty(1), src=0)
    except RuntimeError as exc:
        assert "onnection" in str(exc), exc
    else:
        raise AssertionError("a message came")
    end_process_group()


def test_a_rank_leaves_in_the_middle_of_a_sum_that_its_peer_does_not_come_to(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=rank, args=(str(tmp_path / "rendezvous"),))
        for rank in (leave_a_sum, wait_for_a_message)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(DEADLINE_S)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
