"""The loop of torchrun elastic and plain Ray Train in the recovery benchmark: DDP, a checkpoint
every 50 steps, a line a step.

Written as their own documentation shows: load the newest checkpoint, train, rank 0 saves. Every
rank appends ``{"rank", "world", "step", "at"}`` to its own file below ``steps_dir``.
"""

from __future__ import annotations

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


def train(
    workload_name: str,
    steps_dir: Path,
    stop_file: Path,
    load: Callable[[], dict[str, Any] | None],
    save: Save,
) -> None:
    """Train until ``stop_file`` exists; ``save`` is called by every rank, as Ray Train's report
    must be."""
    workload = WORKLOADS[workload_name]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    raw_model = build_model(workload)
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=workload["optimizer"]["lr"])
    state, step = load(), 0
    if state is not None:
        raw_model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = DistributedDataParallel(raw_model)
    dataset = build_train_set(workload)
    sampler: Any = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(
        dataset, batch_size=workload["train"]["global_batch_size"] // world_size, sampler=sampler
    )
    loss_fn, epoch = nn.CrossEntropyLoss(), 0
    with (steps_dir / f"{os.getpid()}.jsonl").open("w", buffering=1) as out:
        while not stop_file.exists():
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad(set_to_none=True)
                loss_fn(model(images), labels).backward()
                optimizer.step()
                step += 1
                out.write(
                    json.dumps(
                        {
                            "rank": rank,
                            "world": world_size,
                            "step": step,
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
                        },
                        rank,
                    )
            epoch += 1
