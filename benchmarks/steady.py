"""What protection costs while nothing fails: step time with all of it on over that with all of it off, in pairs of runs.

    python -m benchmarks steady --pairs 5

Two ranks on nodes of one CPU, steps of about 25 ms; workers are forked, as on the embedded cluster. On: a run as it is, with its
checkpoints, reports and watch. Off: the loop of ``benchmarks/unprotected.py``, and a controller that looks at its ranks every 5 s.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import summary, write
from benchmarks.workloads import WORKLOADS
from everstep.events import EventKind
from everstep.spec import RunSpec
from tests.integration.driven_run import DrivenRun
from tests.integration.ray_cluster import RayCluster, ray_cluster

GLOBAL_BATCH_SIZE = 240
"""What takes about 25 ms where 192 took 20 to 22."""
STEPS_PER_EPOCH = 6
"""Of 1,437 samples."""
ON = {"EVERSTEP_RECOVERY_WARM_POOL": "0"}
"""As the service sets it on its own cluster."""
OFF = ON | {"EVERSTEP_RECOVERY_POLL_S": "5"}


def step_s(cluster: RayCluster, num_steps: int, *, protected: bool) -> float:
    """Median step time of one run, in seconds, after its first third."""
    workload: dict[str, Any] = {**WORKLOADS["digits"]}
    epochs = -(-num_steps // STEPS_PER_EPOCH)
    workload["train"] = {
        "epochs": epochs,
        "max_steps": num_steps,
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "micro_batch_size": GLOBAL_BATCH_SIZE // 2,
        "eval_every_epochs": epochs + 1,
    }
    del workload["checkpoint"]  # as often as a run saves by default
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        module = "train_fn.driver" if protected else "benchmarks.unprotected"
        run = DrivenRun(cluster, Path(directory), RunSpec.model_validate(workload), module=module)
        try:
            run.start(**(ON if protected else OFF))
            assert run.driver is not None
            code = run.driver.wait()  # nothing reads the journal meanwhile
            run.read_all()
        finally:
            run.stop()
        if code != 0:
            raise RuntimeError(run.describe())
    found = {point["step"]: point["at"] for event in run.of(EventKind.METRICS) for point in event.data["points"]}
    times = [found[step] for step in sorted(found)][num_steps // 3 :]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1200)
    options = parser.parse_args(argv)
    pairs: list[tuple[float, float]] = []
    with ray_cluster(2) as cluster:
        for number in range(options.pairs):
            order = (True, False) if number % 2 == 0 else (False, True)
            times = {protected: step_s(cluster, options.steps, protected=protected) for protected in order}
            pairs.append((times[True], times[False]))
            print(f"on {1000 * times[True]:.2f} ms, off {1000 * times[False]:.2f} ms", flush=True)
    write(
        "steady",
        {
            "on_ms": summary([1000 * on for on, _ in pairs]),
            "off_ms": summary([1000 * off for _, off in pairs]),
            "ratio": summary([on / off for on, off in pairs]),
        },
    )
