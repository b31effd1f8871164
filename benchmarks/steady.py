"""What protection costs while nothing fails: step time with all of it on over that with all of it off, by turns in one run.

    python -m benchmarks steady

Two ranks on nodes of one CPU, steps of about 25 ms; workers are forked, as on the embedded cluster. Protected and plain steps take
turns of two seconds in the same processes (``benchmarks/by_turns.py``): two runs of one loop differ by more than protection costs.
A ratio is that of turns beside each other, by the median of their steps: to plain steps, while the controller and the journal find
nothing new, and ``ratio_alone`` to plain steps while both are stopped, which counts all of Ray's that is in them as protection.
``ratio_of_means`` is that to plain steps by their mean, in which are checkpoints and whatever else does not come with every step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.by_turns import BLOCK, ORDER, TIMES_VARIABLE, Kind
from benchmarks.report import summary, write
from benchmarks.workloads import WORKLOADS
from everstep.spec import RunSpec
from tests.integration.driven_run import DrivenRun
from tests.integration.ray_cluster import RayCluster, ray_cluster

GLOBAL_BATCH_SIZE = 264
"""What takes about 25 ms without protection."""
SETTLING = 10
"""Steps at a turn's begin that are not counted: what one kind does in the background may last into the other's turn."""
NUM_KINDS = len(set(ORDER))
ENVIRONMENT = {"EVERSTEP_RECOVERY_WARM_POOL": "0"}
"""As the service sets it on its own cluster."""


def turns_of(cluster: RayCluster, num_turns: int) -> list[tuple[Kind, list[float]]]:
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
        times = Path(directory) / "times.json"
        workload["env"] = {TIMES_VARIABLE: str(times)}
        run = DrivenRun(cluster, Path(directory), RunSpec.model_validate(workload), module="benchmarks.by_turns")
        try:
            run.start(**ENVIRONMENT)
            assert run.driver is not None
            code = run.driver.wait()  # nothing reads the journal meanwhile
            run.read_all()
        finally:
            run.stop()
        if code != 0:
            raise RuntimeError(run.describe())
        found: list[tuple[Kind, list[float]]] = json.loads(times.read_text())
    return found


def rounds_of(turns: list[tuple[Kind, list[float]]], of: Callable[[Sequence[float]], float]) -> list[dict[Kind, float]]:
    """Seconds of a step of each kind, for all kinds' turns beside each other; without the first ones, whose processes are new."""
    times = [(kind, of(seconds[SETTLING:])) for kind, seconds in turns]
    return [dict(times[first : first + NUM_KINDS]) for first in range(NUM_KINDS, len(times), NUM_KINDS)]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=40, help="turns of each kind; more than one")
    options = parser.parse_args(argv)
    with ray_cluster(2) as cluster:
        turns = turns_of(cluster, options.rounds * NUM_KINDS)
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
