"""Throughput of Everstep, events and checkpoints on, over a plain torchrun DDP script and over
plain Ray Train.

    python -m benchmarks throughput --workload digits --repeats 5

Same model, data, steps and ranks. The three run in turn on the same machine, each with nothing else
running: the service and its cluster are up for Everstep's side only. Samples/s over the steps after
a warm-up, in which Everstep also fills its pool of spare processes; ratios within each repeat.
``--beside torchrun`` leaves plain Ray Train out. ``--nodes 1`` has both ranks on one node, where
torchrun's are; else each has a node of its own, with all the processes that Ray keeps for a node,
as on Ray Train's side.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import summary, write
from benchmarks.workloads import WORKLOADS, build_train_set
from everstep import Client
from tests.support.service_process import ServiceProcess


def samples_per_s(
    points: list[tuple[int, float]],
    warmup_steps: int,
    global_batch_size: int,
    batches_per_epoch: int,
    num_samples: int,
) -> float:
    """Samples per second between the first point after the warm-up and the last; ``points`` are
    (step, unix seconds).

    An epoch's last global batch may be short, so samples are counted step by step.
    """
    measured = [point for point in points if point[0] >= warmup_steps]
    (first_step, begun), (last_step, ended) = measured[0], measured[-1]
    last_batch = num_samples - (batches_per_epoch - 1) * global_batch_size
    samples = sum(
        last_batch if step % batches_per_epoch == 0 else global_batch_size
        for step in range(first_step + 1, last_step + 1)
    )
    return samples / (ended - begun)


SIDES = {
    "torchrun": (
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "benchmarks.torchrun_ddp",
    ),
    "ray_train": ("benchmarks.ray_train_ddp",),
}
"""What Everstep is compared with, as arguments of ``python -m``."""


def run_plain(side: str, workload: str, steps: int) -> list[tuple[int, float]]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "steps.jsonl"
        command = [
            sys.executable,
            "-m",
            *SIDES[side],
            "--workload",
            workload,
            "--steps",
            str(steps),
        ]
        command += ["--out", str(out), "--checkpoint-dir", directory]
        subprocess.run(
            command,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        lines = [json.loads(line) for line in out.read_text().splitlines()]
    return [(line["step"], line["at"]) for line in lines]


def run_everstep(client: Client, workload: str, steps: int) -> list[tuple[int, float]]:
    spec: dict[str, Any] = {**WORKLOADS[workload]}
    spec["train"] = {**spec["train"], "max_steps": steps}
    run = client.runs.create(spec)
    run.wait(timeout_s=900)
    points = [
        (point["step"], point["at"])
        for event in run.events()
        if event.kind == "metrics"
        for point in event.data["points"]
    ]
    return sorted(points)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="digits")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--warmup-steps", type=int, default=1000)
    parser.add_argument(
        "--beside",
        choices=sorted(SIDES),
        action="append",
        help="compare with this one only; may be repeated",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        choices=(1, 2),
        default=2,
        help="nodes of Everstep's cluster, with two CPUs together",
    )
    options = parser.parse_args(argv)
    sides = options.beside or list(SIDES)
    ours: list[float] = []
    theirs: dict[str, list[float]] = {side: [] for side in sides}
    global_batch_size = WORKLOADS[options.workload]["train"]["global_batch_size"]
    num_samples = len(build_train_set(WORKLOADS[options.workload]))
    shape = (
        options.warmup_steps,
        global_batch_size,
        -(-num_samples // global_batch_size),
        num_samples,
    )
    for _ in range(options.repeats):
        for side in sides:
            theirs[side].append(
                samples_per_s(run_plain(side, options.workload, options.steps), *shape)
            )
        with ServiceProcess(nodes=options.nodes, cpus_per_node=2 // options.nodes) as service:
            ours.append(
                samples_per_s(
                    run_everstep(service.client(), options.workload, options.steps), *shape
                )
            )
    write(
        f"throughput_{options.workload}",
        {
            "nodes": options.nodes,
            "everstep_samples_per_s": summary(ours),
            **{f"{side}_samples_per_s": summary(theirs[side]) for side in sides},
            **{
                "ratio" if side == "torchrun" else f"ratio_{side}": summary(
                    [a / b for a, b in zip(ours, theirs[side], strict=True)]
                )
                for side in sides
            },
        },
    )
