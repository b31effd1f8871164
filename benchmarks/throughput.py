"""Throughput of Everstep, events and checkpoints on, over a plain torchrun DDP script and over
plain Ray Train.

    python -m benchmarks throughput --workload digits --repeats 5

Same model, data, steps and ranks. The three run in turn on the same machine, each with nothing else
running: the service and its cluster are up for Everstep's side only. Samples/s over the steps after
a warm-up, in which Everstep also fills its pool of spare processes; ratios within each repeat.
``--beside torchrun`` leaves plain Ray Train out. ``--nodes 1`` has both ranks on one node, where
torchrun's are; else each has a node of its own, with all the processes that Ray keeps for a node,
as on Ray Train's side.

``--shares`` compares ``scaling.shares: by_speed`` with equal shares instead, by turns: two ranks of
0.4 cores each, and again with half as much for rank 1. Quotas of cgroup v1 hold them to that, so it
needs root, and other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.report import summary, write
from benchmarks.workloads import WORKLOADS, build_train_set
from everstep import Client, RunFailed
from everstep.client.runs import RunHandle
from tests.support.service_process import ServiceProcess, wait_for


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


def points_of(run: RunHandle) -> list[tuple[int, float]]:
    return sorted(
        (point["step"], point["at"])
        for event in run.events()
        if event.kind == "metrics"
        for point in event.data["points"]
    )


def run_everstep(client: Client, workload: str, steps: int) -> list[tuple[int, float]]:
    spec: dict[str, Any] = {**WORKLOADS[workload]}
    spec["train"] = {**spec["train"], "max_steps": steps}
    run = client.runs.create(spec)
    run.wait(timeout_s=900)
    return points_of(run)


# ---------------------------------------------------------------- shares


_CPU = Path("/sys/fs/cgroup/cpu/everstep-shares")
_PERIOD_US = 20_000
MACHINES = {"equal": (0.4, 0.4), "unequal": (0.4, 0.2)}
"""Quotas of the two ranks, in cores."""


@contextmanager
def quotas(pids: list[int], cores: tuple[float, ...]) -> Iterator[None]:
    """Give each process so much of a core, ahead of whatever else the machine does."""
    groups = [_CPU / str(number) for number in range(len(pids))]
    groups[0].mkdir(parents=True, exist_ok=True)
    (_CPU / "cpu.shares").write_text("100000")
    for group, pid, quota in zip(groups, pids, cores, strict=True):
        group.mkdir(exist_ok=True)
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(_PERIOD_US * quota)))
        (group / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        for pid in pids:
            (_CPU.parent / "cgroup.procs").write_text(str(pid))
        for group in (*groups, _CPU):
            group.rmdir()


def steps_per_s(
    client: Client, workload: str, shares: str, seconds: float, cores: tuple[float, ...]
) -> float:
    """Steps per second in the second half of a run, which leaves it the first one to plan."""
    spec: dict[str, Any] = {**WORKLOADS[workload]}
    train = spec["train"]
    micro = max(1, train["global_batch_size"] // 16)
    spec["train"] = {**train, "exactness": "elastic", "micro_batch_size": micro}
    spec["scaling"] = {**spec["scaling"], "shares": shares}
    run = client.runs.create(spec)
    wait_for(lambda: run.refresh().step > 1, 240, "the first steps")
    with quotas([each.pid for each in run.attempts()[-1].workers], cores):
        began = time.time()
        time.sleep(seconds)
    ended = began + seconds
    run.cancel()
    with suppress(RunFailed):
        run.wait(timeout_s=120)
    for event in run.events():
        if event.kind == "shares_planned":
            print(event.data, flush=True)
    points = [(step, at) for step, at in points_of(run) if (began + ended) / 2 < at < ended]
    return (points[-1][0] - points[0][0]) / (points[-1][1] - points[0][1])


def compare_shares(workload: str, repeats: int, seconds: float) -> None:
    found: dict[str, dict[str, list[float]]] = {
        machine: {"equal": [], "by_speed": []} for machine in MACHINES
    }
    with ServiceProcess(nodes=2, cpus_per_node=1) as service:
        for number in range(repeats):
            for machine, cores in MACHINES.items():
                for shares in ["equal", "by_speed"][:: 1 if number % 2 else -1]:
                    took = steps_per_s(service.client(), workload, shares, seconds, cores)
                    found[machine][shares].append(took)
                    print(f"{machine} ranks, {shares}: {took:.3f} steps/s", flush=True)
    results = {
        machine: {
            **{f"{shares}_steps_per_s": summary(values) for shares, values in of_machine.items()},
            "ratio": summary(
                [one / other for one, other in zip(*list(of_machine.values())[::-1], strict=True)]
            ),
        }
        for machine, of_machine in found.items()
    }
    write(f"shares_{workload}", results)


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
    parser.add_argument("--shares", action="store_true", help="compare shares instead")
    parser.add_argument("--seconds", type=float, default=50, help="of a run with --shares")
    options = parser.parse_args(argv)
    if options.shares:
        compare_shares(options.workload, options.repeats, options.seconds)
        return
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
