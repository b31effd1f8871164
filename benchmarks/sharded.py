"""What protection of a sharded loop costs, and what a death costs it, beside DDP.

    python -m benchmarks sharded --mb 10 1000 --repeats 3

Two ranks of FSDP2 over gloo, on two nodes that are names: pieces go over sockets and into shared
memory as between hosts. First steps that are protected and plain by turns (``benchmarks protect``),
where ranks fill both cores, and where each step leaves them idle for a while. Then kills: a rank
and the memory of its node, with states of such sizes. The others leave, and processes that have
imported torch start at once, without a service. The same for DDP, and for three ranks in place of
two.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.protect import by_turns
from benchmarks.report import summary, write
from tests.support.own_loops import on_node
from tests.support.service_process import wait_for
from train_fn.node.node_dir import shared_memory_root

LAYERS, BATCH = 8, 8
KILL_STEP, LAST_STEP = 3, 5
GIVE_UP_S = 300.0


def sharded(model: nn.Sequential, *, own_node: bool = False) -> nn.Module:
    """Return a model that is sharded over all ranks, layer by layer."""
    if own_node:
        on_node(f"node{dist.get_rank()}")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in [*model, model]:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return model


def _rank(rank: int, nodes: list[str], base: str, attempt: int, width: int, kind: str) -> None:
    import everstep.train as es

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    on_node(nodes[rank])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{base}/meet{attempt}", rank=rank, world_size=len(nodes)
    )
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    model = sharded(layers) if kind == "sharded" else DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(BATCH, width)
    state = es.protect(
        model=model,
        optimizer=optimizer,
        storage=f"{base}/storage",
        run_id=Path(base).name,
        checkpoint={"every_steps": 1000},
    )
    with state, Path(base, f"steps{attempt}-{rank}").open("w", buffering=1) as steps:
        while state.step_number < (LAST_STEP if attempt == 2 else 1000):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step(loss=loss)
            steps.write(f"{time.time()}\n")


def _wait_for_steps(base: str, attempt: int, ranks: list[Any], number: int) -> float:
    """Wait until each rank has made so many steps. Return when the last of them was made."""

    def made() -> float | None:
        files = [Path(base, f"steps{attempt}-{rank}") for rank in range(len(ranks))]
        steps = [file.read_text().split() if file.is_file() else [] for file in files]
        is_made = all(len(each) >= number for each in steps)
        return max(float(each[number - 1]) for each in steps) if is_made else None

    return wait_for(made, GIVE_UP_S, f"step {number} of attempt {attempt}", every_s=0.005)


def recover(megabytes: int, kind: str, size: int) -> float:
    """Kill a rank of two with its node, go on with so many, and return the seconds to the next
    step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_fn.protect.door", "torch._dynamo", __name__])
    width = round((megabytes * 1e6 / 12 / LAYERS) ** 0.5)
    with tempfile.TemporaryDirectory(prefix="bench-sharded-") as base:

        def begun(attempt: int, nodes: list[str]) -> list[Any]:
            ranks = [
                context.Process(target=_rank, args=(rank, nodes, base, attempt, width, kind))
                for rank in range(len(nodes))
            ]
            for each in ranks:
                each.start()
            return ranks

        ranks = begun(1, ["a", "b"])
        try:
            _wait_for_steps(base, 1, ranks, KILL_STEP)
            os.kill(ranks[1].pid, signal.SIGKILL)
            killed_at = time.time()
            for each in ranks:
                each.join(GIVE_UP_S)
            for place in (shared_memory_root() / Path(base).name).glob("b.*"):
                shutil.rmtree(place)
            ranks = begun(2, ["a", *(f"new{at}" for at in range(1, size))])
            return _wait_for_steps(base, 2, ranks, 1) - killed_at
        finally:
            for each in ranks:
                each.kill()
                each.join()
            shutil.rmtree(shared_memory_root() / Path(base).name, ignore_errors=True)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--mb", type=int, nargs="+", default=[10, 1000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=60, help="an even number; more than four")
    parser.add_argument("--idle-ms", type=float, default=100.0)
    options = parser.parse_args(argv)
    results: dict[str, Any] = {"load": os.getloadavg()}
    wrap = partial(sharded, own_node=True)
    results["cores are full"] = by_turns(options.turns, wrap)
    results[f"{options.idle_ms:g} ms of a step idle"] = by_turns(
        options.turns, wrap, options.idle_ms / 1000
    )
    for megabytes in options.mb:
        for kind, size in (("sharded", 2), ("ddp", 2), ("sharded", 3)):
            found = [recover(megabytes, kind, size) for _ in range(options.repeats)]
            print(megabytes, kind, size, [round(each, 2) for each in found], flush=True)
            results[f"{megabytes} MB, {kind}, 2 to {size} ranks"] = summary(found)
    write("sharded", {**results, "load at the end": os.getloadavg()})
