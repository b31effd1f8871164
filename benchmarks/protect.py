"""What ``es.protect`` costs while nothing fails: protected over plain steps of one loop, by turns.

    python -m benchmarks protect

Two processes exchange gradients over gloo, with steps of about 25 ms. Turns of protected and plain
steps alternate on the same model, so that what drifts falls on both. A plain step is the same loop
without hooks and without ``state.step()``; the processes around it are the same. A ratio is that of
the medians of two turns beside each other.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.report import summary, write

WORLD_SIZE = 2
TURN = 20
"""Steps of a turn."""
SETTLING = 4
"""Steps at its begin that are not counted."""
WIDTH, BATCH = 640, 160
"""Of the model and a rank's batch: what takes about 25 ms on a core."""


def _rank(
    rank: int,
    base: str,
    num_turns: int,
    wrap: Callable[[nn.Sequential], nn.Module] = DistributedDataParallel,
    idle_s: float = 0.0,
) -> None:
    import everstep.train as es

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{base}/rendezvous", rank=rank, world_size=WORLD_SIZE
    )
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = wrap(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(BATCH, WIDTH)
    state = es.protect(model=model, optimizer=optimizer, storage=f"{base}/storage", run_id="bench")

    def train() -> torch.Tensor:
        loss: torch.Tensor = model(inputs).square().mean()
        time.sleep(idle_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    turns: list[list[float]] = []
    with state:
        for number in range(num_turns):
            is_protected = number % 4 in (0, 3)
            dist.barrier()
            steps_s = []
            if not is_protected:
                for hook in state._hooks:
                    hook.remove()
            for _ in range(TURN):
                began = time.perf_counter()
                loss = train()
                if is_protected:
                    state.step(loss=loss)
                else:
                    loss.item()
                steps_s.append(time.perf_counter() - began)
            if not is_protected:
                state._hooks = [optimizer.register_step_pre_hook(state._before_update)]
            turns.append(steps_s[SETTLING:])
    if rank == 0:
        Path(base, "turns.json").write_text(json.dumps(turns))
    dist.destroy_process_group()


def results_of(turns: list[list[float]]) -> dict[str, Any]:
    """Compare each pair of turns, without the first."""
    medians = [statistics.median(turn) for turn in turns]
    pairs = [
        sorted((at, at + 1), key=lambda n: n % 4 not in (0, 3))
        for at in range(2, len(turns) - 1, 2)
    ]
    ratios = [medians[protected] / medians[plain] for protected, plain in pairs]
    return {
        "protected_ms": summary([1000 * medians[protected] for protected, _ in pairs]),
        "plain_ms": summary([1000 * medians[plain] for _, plain in pairs]),
        "ratio": {
            **summary(ratios),
            "standard_error": round(statistics.stdev(ratios) / math.sqrt(len(ratios)), 4),
        },
    }


def by_turns(
    num_turns: int,
    wrap: Callable[[nn.Sequential], nn.Module] = DistributedDataParallel,
    idle_s: float = 0.0,
) -> dict[str, Any]:
    """Measure a model that ``wrap`` wraps on each rank.

    Args:
        idle_s: how long each step leaves the cores to others, as one does on a GPU.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-") as base:
        ranks = [
            context.Process(target=_rank, args=(rank, base, num_turns, wrap, idle_s))
            for rank in range(WORLD_SIZE)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"ranks ended with {[process.exitcode for process in ranks]}")
        return results_of(json.loads(Path(base, "turns.json").read_text()))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--turns", type=int, default=200, help="an even number; more than four")
    write("protect", by_turns(parser.parse_args(argv).turns))
