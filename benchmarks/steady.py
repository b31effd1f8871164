"""What protection costs while nothing fails: step time with all of it on over that with all of it
off, by turns in one run.

    python -m benchmarks steady

Two ranks on the embedded cluster's nodes of one CPU, steps of about 25 ms. Protected and plain
steps take turns of four seconds in the same processes (``benchmarks/by_turns.py``): two runs of one
loop differ by more than protection costs. A ratio is that of turns beside each other, by the median
of their steps: to plain steps, while the controller and the journal find nothing new, and
``ratio_alone`` to plain steps while both are stopped, which counts all of Ray's that is in them as
protection. ``ratio_of_means`` is that to plain steps by their mean, in which are checkpoints and
whatever else does not come with every step.

A core that others use, too (a virtual machine's, which shares it with another's), may become half
as fast from one second to the next. Each rank times a small fixed piece of work before each step;
``quiet`` are those steps before and after which it took none of them longer than usual. Of these
there are enough to tell what ``all`` cannot: ``standard_error`` is that of the rounds' mean ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import operator
import os
import shlex
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.by_turns import BLOCK, ORDER, SETTLING, TIMES_VARIABLE, Kind, Turn
from benchmarks.report import summary, write
from benchmarks.workloads import WORKLOADS
from everstep.spec.run_spec import RunSpec
from service.cluster.ray_jobs import Job, JobStatus, RayEndpoint, RayJobs
from service.embedded.cluster import EmbeddedCluster
from service.settings import Settings
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from train_fn.node.node_dir import shared_memory_root

GLOBAL_BATCH_SIZE = 360
"""What takes 20 to 25 ms without protection, and makes an epoch of four steps that are as long as
each other."""
NUM_KINDS = len(set(ORDER))
QUIET = 1.2
"""How much longer than usual a rank's piece of work may take beside a quiet step; on a core that is
shared it takes twice as long."""
LEAST_QUIET = 20
"""Quiet steps that a turn must have to count."""
JOB = "steady"
POLL_S = 2.0
"""How often the job is looked for, as a service does."""


def turns_of(num_turns: int, global_batch_size: int) -> list[Turn]:
    """Every turn of one run."""
    workload: dict[str, Any] = {**WORKLOADS["digits"]}
    num_steps = num_turns * BLOCK
    workload["train"] = {
        "epochs": num_steps,  # more than there will be
        "max_steps": num_steps + 1,  # the last step of a run is followed by an evaluation
        "global_batch_size": global_batch_size,
        "micro_batch_size": global_batch_size // 2,
        "eval_every_epochs": num_steps + 1,
    }
    del workload["checkpoint"]  # as often as a run saves by default
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        times, storage = Path(directory) / "times.json", str(Path(directory) / "storage")
        workload["env"] = {TIMES_VARIABLE: str(times)}
        run_dir = RunDir(open_storage(storage), f"run_steady{os.getpid()}")
        run_dir.write_spec(RunSpec.model_validate(workload))
        words = [
            "python",
            "-m",
            "benchmarks.by_turns",
            "--storage",
            storage,
            "--run-id",
            run_dir.run_id,
            "--submission",
            "1",
        ]
        cluster = EmbeddedCluster(Settings(home=Path(directory), nodes=2))
        try:
            url = cluster.ensure_running().dashboard_url
            assert url is not None
            job = asyncio.run(ended_job(RayEndpoint(url, cluster.token()), shlex.join(words)))
        finally:
            cluster.stop()
            shutil.rmtree(shared_memory_root() / run_dir.run_id, ignore_errors=True)
        if job.status is not JobStatus.SUCCEEDED:
            raise RuntimeError(job.message)
        return [Turn(*each) for each in json.loads(times.read_text())]


async def ended_job(endpoint: RayEndpoint, entrypoint: str) -> Job:
    """Run a job to its end."""
    async with RayJobs(lambda: endpoint) as ray:
        await ray.submit(JOB, entrypoint, {})
        while True:
            job = await ray.job(JOB)
            if job.status.ended:
                return job
            await asyncio.sleep(POLL_S)


def rounds_of(
    turns: list[Turn], steps_of: Callable[[Turn], list[float]]
) -> list[dict[Kind, list[float]]]:
    """Seconds of the steps that count, of turns of all kinds beside each other; without the first
    ones, whose processes are new."""
    found = [(turn.kind, steps_of(turn)) for turn in turns]
    return [
        dict(found[first : first + NUM_KINDS]) for first in range(NUM_KINDS, len(found), NUM_KINDS)
    ]


def settled_steps(turn: Turn) -> list[float]:
    return turn.steps_s[SETTLING:]


def quiet_steps(turns: Sequence[Turn]) -> Callable[[Turn], list[float]]:
    """Of a turn the settled steps during which the cores of all ranks were as fast as they usually
    are in ``turns``."""
    works_of_ranks = zip(*(turn.works_s for turn in turns), strict=True)
    longest_s = [
        QUIET * statistics.quantiles(itertools.chain(*works_s), n=4)[0]
        for works_s in works_of_ranks
    ]

    def steps_of(turn: Turn) -> list[float]:
        fast = [
            all(map(operator.le, works_s, longest_s)) for works_s in zip(*turn.works_s, strict=True)
        ]
        return [turn.steps_s[at] for at in range(SETTLING, BLOCK) if fast[at] and fast[at + 1]]

    return steps_of


def results_of(rounds: list[dict[Kind, list[float]]]) -> dict[str, Any]:
    """Steps' times, and what is compared by them."""

    def seconds(of: Callable[[Sequence[float]], float]) -> list[dict[Kind, float]]:
        return [{kind: of(steps_s) for kind, steps_s in found.items()} for found in rounds]

    medians, means = seconds(statistics.median), seconds(statistics.fmean)
    return {
        "rounds": len(rounds),
        **{
            f"{kind}_ms": summary([1000 * found[kind] for found in medians])
            for kind in ORDER[:NUM_KINDS]
        },
        "ratio": ratio_of(medians, "plain"),
        "ratio_alone": ratio_of(medians, "alone"),
        "ratio_of_means": ratio_of(means, "plain"),
    }


def ratio_of(rounds: list[dict[Kind, float]], other: Kind) -> dict[str, Any]:
    """Protected steps' times over those of another kind."""
    ratios = [found["protected"] / found[other] for found in rounds]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return {
        **summary(ratios),
        "mean": round(statistics.fmean(ratios), 4),
        "standard_error": round(error, 4),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=40, help="turns of each kind; more than two")
    parser.add_argument(
        "--batch",
        type=int,
        default=GLOBAL_BATCH_SIZE,
        help="global batch size: what a step's length depends on",
    )
    options = parser.parse_args(argv)
    # of the cluster, whose ranks take these turns
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    turns = turns_of(options.rounds * NUM_KINDS, options.batch)
    quiet = [
        each
        for each in rounds_of(turns, quiet_steps(turns))
        if min(map(len, each.values())) >= LEAST_QUIET
    ]
    results = {
        "all": results_of(rounds_of(turns, settled_steps)),
        "quiet": results_of(quiet) if len(quiet) > 1 else None,
    }
    write("steady", results)
