"""torchft on the loop of the recovery benchmark: one replica group a process, after torchft's own
documentation.

    pip install --no-deps torchft==0.2.0
    torchft_lighthouse --bind 127.0.0.1:PORT --min_replicas 1
    python -m benchmarks.elastic_torchft NUMBER PORT WORKLOAD DIRECTORY

``benchmarks.elastic_ray`` calls the same loop below Ray Train's ``TorchftConfig``.
The model, data and batch are those of the other sides. Gradients are averaged by the manager in one
all-reduce after the backward pass: torchft's own wrapper for DDP ends the survivor with an
AssertionError where its peer dies within an all-reduce over gloo. Each step that is committed is a
line as of ``elastic_loop``; ``world`` are the groups that took part in it, ``dropped`` is how many
batches of this group no step has used so far. The first two groups wait for each other, so that no
run begins with one alone. A newcomer begins the epoch of the state that it receives.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from benchmarks.elastic_loop import is_last
from benchmarks.workloads import WORKLOADS, build_model, build_train_set
from tests.support.service_process import wait_for

GROUPS = 2


def train(number: int, lighthouse: str, workload_name: str, directory: Path) -> None:
    """Train as replica group ``number`` of GROUPS until ``is_last``."""
    from torchft import DistributedSampler, Manager, Optimizer, ProcessGroupGloo

    workload = WORKLOADS[workload_name]
    torch.manual_seed(0)
    model = build_model(workload)
    parameters = list(model.parameters())
    raw_optimizer = torch.optim.AdamW(parameters, lr=workload["optimizer"]["lr"])

    epoch = 0

    def load(state: dict[str, Any]) -> None:
        nonlocal epoch
        epoch = state["epoch"]
        model.load_state_dict(state["model"])
        raw_optimizer.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": raw_optimizer.state_dict(),
            "epoch": epoch,
        }

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{number}",
        hostname="127.0.0.1",
    )
    optimizer = Optimizer(manager, raw_optimizer)
    (directory / f"ready-{number}").touch()
    wait_for(lambda: len(list(directory.glob("ready-*"))) == GROUPS, 120, "the other group")
    dataset = build_train_set(workload)
    sampler = DistributedSampler(
        dataset, replica_rank=number, num_replica_groups=GROUPS, group_rank=0, num_replicas=1
    )
    batch_size = workload["train"]["global_batch_size"] // GROUPS
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)
    loss_fn, dropped = nn.CrossEntropyLoss(), 0
    with (directory / "steps" / f"{os.getpid()}.jsonl").open("w", buffering=1) as out:

        def train_epoch() -> bool:
            """Train on an epoch, or until another one was received; return whether to go on."""
            nonlocal dropped, epoch
            current = epoch
            sampler.set_epoch(current)
            for batch, (images, labels) in enumerate(loader):
                optimizer.zero_grad()
                loss_fn(model(images), labels).backward()
                gradients = [each.grad for each in parameters if each.grad is not None]
                mean = parameters_to_vector(gradients)
                manager.allreduce(mean).wait()
                vector_to_parameters(mean, gradients)
                before = manager.current_step()
                optimizer.step()
                if manager.current_step() == before:
                    dropped += 1
                    continue
                line = {
                    "rank": number,
                    "world": manager.num_participants(),
                    "parts": GROUPS,
                    "step": manager.current_step(),
                    "epoch": current,
                    "batch": batch,
                    "at": time.time(),
                    "pid": os.getpid(),
                    "dropped": dropped,
                }
                out.write(json.dumps(line) + "\n")
                if is_last(directory, manager.current_step(), model, saves=number == 0):
                    return False
                if epoch != current:
                    return True
            epoch = current + 1
            return True

        while train_epoch():
            pass


if __name__ == "__main__":
    train(int(sys.argv[1]), f"http://127.0.0.1:{sys.argv[2]}", sys.argv[3], Path(sys.argv[4]))
    os._exit(0)  # its threads wait for groups that may be gone
