"""What protection costs while nothing fails: step time with all of it on over that with all of it off, by turns in one run.

    python -m benchmarks steady

Two ranks on the embedded cluster's nodes of one CPU, steps of about 25 ms. Protected and plain steps take turns of two seconds in
the same processes (``benchmarks/by_turns.py``): two runs of one loop differ by more than protection costs. A ratio is that of turns
beside each other, by the median of their steps: to plain steps, while the controller and the journal find nothing new, and
``ratio_alone`` to plain steps while both are stopped, which counts all of Ray's that is in them as protection.
``ratio_of_means`` is that to plain steps by their mean, in which are checkpoints and whatever else does not come with every step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.by_turns import BLOCK, ORDER, TIMES_VARIABLE, Kind
from benchmarks.report import summary, write
from benchmarks.workloads import WORKLOADS
from everstep.spec import RunSpec
from service.embedded.cluster import EmbeddedCluster
from service.ray_jobs import Job, JobStatus, RayEndpoint, RayJobs
from service.settings import Settings
from storage.filesystem import open_storage
from train_fn.node_dir import shared_memory_root

GLOBAL_BATCH_SIZE = 264
"""What takes about 25 ms without protection."""
SETTLING = 10
"""Steps at a turn's begin that are not counted: what one kind does in the background may last into the other's turn."""
NUM_KINDS = len(set(ORDER))
JOB = "steady"
POLL_S = 2.0
"""How often the job is looked for, as a service does."""


def turns_of(num_turns: int) -> list[tuple[Kind, list[float]]]:
    """(kind, seconds of each step) of every turn of one run."""
    workload: dict[str, Any] = {**WORKLOADS["digits"]}
    num_steps = num_turns * BLOCK
    workload["train"] = {
        "epochs": num_steps,  # more than there will be
        "max_steps": num_steps + 1,  # the last step of a run is followed by an evaluation
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "micro_batch_size": GLOBAL_BATCH_SIZE // 2,
        "eval_every_epochs": num_steps + 1,
    }
    del workload["checkpoint"]  # as often as a run saves by default
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        times, storage = Path(directory) / "times.json", str(Path(directory) / "storage")
        workload["env"] = {TIMES_VARIABLE: str(times)}
        run_dir = open_storage(storage).run_dir(f"run_steady{os.getpid()}")
        run_dir.write_spec(RunSpec.model_validate(workload))
        words = ["python", "-m", "benchmarks.by_turns", "--storage", storage, "--run-id", run_dir.run_id, "--submission", "1"]
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
        found: list[tuple[Kind, list[float]]] = json.loads(times.read_text())
    return found


async def ended_job(endpoint: RayEndpoint, entrypoint: str) -> Job:
    """Run a job to its end."""
    async with RayJobs(lambda: endpoint) as ray:
        await ray.submit(JOB, entrypoint, {})
        while True:
            job = await ray.job(JOB)
            if job.status.ended:
                return job
            await asyncio.sleep(POLL_S)


def rounds_of(turns: list[tuple[Kind, list[float]]], of: Callable[[Sequence[float]], float]) -> list[dict[Kind, float]]:
    """Seconds of a step of each kind, for all kinds' turns beside each other; without the first ones, whose processes are new."""
    times = [(kind, of(seconds[SETTLING:])) for kind, seconds in turns]
    return [dict(times[first : first + NUM_KINDS]) for first in range(NUM_KINDS, len(times), NUM_KINDS)]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=40, help="turns of each kind; more than one")
    options = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # of the cluster, whose ranks take these turns
    turns = turns_of(options.rounds * NUM_KINDS)
    medians, means = rounds_of(turns, statistics.median), rounds_of(turns, statistics.fmean)
    write(
        "steady",
        {
            **{f"{kind}_ms": summary([1000 * found[kind] for found in medians]) for kind in ORDER[:NUM_KINDS]},
            "ratio": summary([found["protected"] / found["plain"] for found in medians]),
            "ratio_alone": summary([found["protected"] / found["alone"] for found in medians]),
            "ratio_of_means": summary([found["protected"] / found["plain"] for found in means]),
        },
    )
