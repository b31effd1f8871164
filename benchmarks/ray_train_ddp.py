"""Plain DDP training as Ray Train's guides write it: ``prepare_model``, ``prepare_data_loader``, a
checkpoint every 50 steps.

    python -m benchmarks.ray_train_ddp --workload digits --steps 500 \\
        --out steps.jsonl --checkpoint-dir /tmp/here

Two workers on two local nodes of one CPU each, everything else as Ray ships it. Rank 0 writes one
JSON line a step: {"step", "at" (unix seconds), "loss" (its own share's mean)}, as
``torchrun_ddp.py`` does, with which it shares model, samples and settings.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.cluster_utils import Cluster
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.torchrun_ddp import arguments
from benchmarks.workloads import WORKLOADS, build_model, build_train_set

NUM_WORKERS = 2
NUM_KEPT = 3
"""Checkpoints that are kept, as on Everstep's side."""


def train_fn(config: dict[str, Any]) -> None:
    workload, place = WORKLOADS[config["workload"]], ray.train.get_context()
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(build_model(workload))
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload["optimizer"]["lr"])
    batch_size = workload["train"]["global_batch_size"] // place.get_world_size()
    loader = DataLoader(build_train_set(workload), batch_size=batch_size, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    loss_fn = nn.CrossEntropyLoss()

    step, epoch = 0, 0
    with Path(config["out"] if place.get_world_rank() == 0 else os.devnull).open("w") as out:
        while step < config["steps"]:
            loader.sampler.set_epoch(epoch)
            for inputs, targets in loader:
                optimizer.zero_grad(set_to_none=True)
                loss = loss_fn(model(inputs).flatten(0, -2), targets.flatten())
                loss.backward()
                optimizer.step()
                step += 1
                out.write(json.dumps({"step": step, "at": time.time(), "loss": loss.item()}) + "\n")
                if step % workload["checkpoint"]["every_steps"] == 0:
                    report(model, optimizer, step, rank=place.get_world_rank())
                if step == config["steps"]:
                    break
            epoch += 1


def report(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if rank == 0:
            state = {
                "model": model.module.state_dict(),  # type: ignore[union-attr]
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            torch.save(state, Path(directory) / "checkpoint.pt")
            checkpoint = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({"step": step}, checkpoint=checkpoint)


def main() -> None:
    options = arguments()
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        for _ in range(NUM_WORKERS):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        TorchTrainer(
            train_fn,
            train_loop_config={
                "workload": options.workload,
                "steps": options.steps,
                "out": str(options.out),
            },
            scaling_config=ray.train.ScalingConfig(num_workers=NUM_WORKERS),
            run_config=ray.train.RunConfig(
                name="plain",
                storage_path=str(options.checkpoint_dir),
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=NUM_KEPT),
            ),
        ).fit()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
