"""Plain DDP training as the public tutorials write it, for torchrun: DataLoader,
DistributedSampler, a checkpoint every 50 steps.

    torchrun --nproc-per-node 2 -m benchmarks.torchrun_ddp \\
        --data digits --epochs 5 --out steps.jsonl

Rank 0 writes one JSON line a step: {"step", "at" (unix seconds), "loss" (its own share's mean)}.
Only the model, the raw images and their augmentation come from train_fn, so that both sides train
the same thing; everything else is written out here.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.workloads import WORKLOADS, build_model, build_train_set


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="digits")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    workload = WORKLOADS[options.workload]
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(build_model(workload))
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload["optimizer"]["lr"])
    dataset = build_train_set(workload)
    batch_size = workload["train"]["global_batch_size"] // world_size
    sampler: Any = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    loss_fn = nn.CrossEntropyLoss()

    step, epoch = 0, 0
    with options.out.open("w") if rank == 0 else open(os.devnull, "w") as out:  # noqa: PTH123
        while step < options.steps:
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                optimizer.zero_grad(set_to_none=True)
                loss = loss_fn(
                    model(inputs).flatten(0, -2), targets.flatten()
                )  # of images [n, classes]; of text every token counts
                loss.backward()
                optimizer.step()
                step += 1
                out.write(json.dumps({"step": step, "at": time.time(), "loss": loss.item()}) + "\n")
                if step % workload["checkpoint"]["every_steps"] == 0 and rank == 0:
                    state = {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                    }
                    torch.save(state, options.checkpoint_dir / "checkpoint.pt")
                if step == options.steps:
                    break
            epoch += 1
    dist.barrier()
    # Gloo's tear-down at the end of the interpreter aborts now and then, and torchrun would take
    # that for a failure.
    os._exit(0)


if __name__ == "__main__":
    main()
