"""The loop of torchrun elastic and plain Ray Train in the recovery benchmark: DDP, a checkpoint
every 50 steps, a line a step.

Written as their own documentation shows: load the newest checkpoint, begin its epoch again, train,
rank 0 saves. Every rank appends a line a step to its own file below DIRECTORY/steps. ``samples``
tells from these lines which samples a step used.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.workloads import WORKLOADS, build_model, build_train_set

Save = Callable[[dict[str, Any], int], None]


def is_last(directory: Path, step: int, model: nn.Module, *, saves: bool) -> bool:
    """Return whether training ends with this step; save the weights if they are wanted.

    DIRECTORY/stop has the steps whose weights are wanted, with spaces between. The last of them
    ends training. An empty file ends it now.
    """
    try:
        wanted = [int(text) for text in (directory / "stop").read_text().split()]
    except FileNotFoundError:
        return False
    if saves and step in wanted:
        path = directory / f"weights-{step}.pt"
        torch.save(model.state_dict(), f"{path}.tmp")
        Path(f"{path}.tmp").rename(path)
    return step >= max(wanted, default=0)


@functools.cache
def order(num_samples: int, parts: int, part: int, epoch: int) -> list[int]:
    """Return one part's samples of an epoch, in the order in which every side's sampler yields
    them."""
    sampler: Any = DistributedSampler(range(num_samples), num_replicas=parts, rank=part)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)


def samples(line: dict[str, Any], num_samples: int, global_batch_size: int) -> list[int]:
    """Return the samples that the batch of a step's line has."""
    size = global_batch_size // line["parts"]
    begin = line["batch"] * size
    part = order(num_samples, line["parts"], line["rank"], line["epoch"])
    return part[begin : begin + size]


def train(
    workload_name: str,
    directory: Path,
    load: Callable[[], dict[str, Any] | None],
    save: Save,
) -> None:
    """Train until ``is_last``; ``save`` is called by every rank, as Ray Train's report must be."""
    workload = WORKLOADS[workload_name]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    raw_model = build_model(workload)
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=workload["optimizer"]["lr"])
    state, step, epoch = load(), 0, 0
    if state is not None:
        raw_model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, epoch = state["step"], state["epoch"]
    model = DistributedDataParallel(raw_model)
    dataset = build_train_set(workload)
    sampler: Any = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(
        dataset, batch_size=workload["train"]["global_batch_size"] // world_size, sampler=sampler
    )
    loss_fn = nn.CrossEntropyLoss()
    with (directory / "steps" / f"{os.getpid()}.jsonl").open("w", buffering=1) as out:
        while True:
            sampler.set_epoch(epoch)
            for batch, (images, labels) in enumerate(loader):
                optimizer.zero_grad(set_to_none=True)
                loss_fn(model(images), labels).backward()
                optimizer.step()
                step += 1
                out.write(
                    json.dumps(
                        {
                            "rank": rank,
                            "world": world_size,
                            "parts": world_size,
                            "step": step,
                            "epoch": epoch,
                            "batch": batch,
                            "at": time.time(),
                            "pid": os.getpid(),
                        }
                    )
                    + "\n"
                )
                if step % workload["checkpoint"]["every_steps"] == 0:
                    save(
                        {
                            "model": raw_model.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "step": step,
                            "epoch": epoch,
                        },
                        rank,
                    )
                if is_last(directory, step, raw_model, saves=rank == 0):
                    return
            epoch += 1
