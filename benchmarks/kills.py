"""Many kills of a node under a protected loop that fills its cores: seconds to the next step.

    python -m benchmarks kills --repeats 20

Two nodes of one CPU, one rank each. After each kill the node is replaced, and the run grows back.
``--beside 2`` runs so many busy processes of another session on the same cores, as a second user of
the machine would.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import protected_loop
from benchmarks.recovery import cancel
from benchmarks.report import summary, write
from benchmarks.steps import around
from everstep.client.runs import RunHandle
from tests.support.service_process import ServiceProcess, wait_for

GIVE_UP_S = 240.0
STEPS = 30
"""Steps at full size before a kill."""


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Run processes that never wait, each in a session of its own."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command, start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def kill_once(service: ServiceProcess, run: RunHandle) -> dict[str, float]:
    """Kill the node of the last rank, and replace it once the run goes on."""

    def is_whole() -> bool:
        attempts = run.attempts()
        return bool(attempts) and attempts[-1].world_size == 2 and run.status == "RUNNING"

    wait_for(lambda: run.refresh() and is_whole(), GIVE_UP_S, "the full size", every_s=0.2)
    began_at = run.refresh().step
    wait_for(lambda: run.refresh().step >= began_at + STEPS, GIVE_UP_S, "some steps", every_s=0.2)
    attempt = run.attempts()[-1]
    number = len(run.failures())
    killed_at = time.time()
    service.kill_node(attempt.workers[-1].node_id)
    _, (_, first_at) = around(run, attempt.attempt, killed_at, GIVE_UP_S)
    wait_for(lambda: len(run.failures()) > number, GIVE_UP_S, "the failure")
    lost = run.failures()[-1].steps_lost
    service.refill()
    wait_for(service.whole, GIVE_UP_S, "the node's replacement", every_s=0.2)
    return {"recovery_s": first_at - killed_at, "steps_lost": -1 if lost is None else lost}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--beside", type=int, default=0, help="busy processes beside the cluster")
    options = parser.parse_args(argv)
    found: list[dict[str, float]] = []
    with ServiceProcess(nodes=2) as service:
        client = service.client()
        code = client.code.upload(Path(protected_loop.__file__))
        spec: dict[str, Any] = {
            "name": "kills",
            "code": {
                "archive": code.digest,
                "train_fn": "protected_loop:train_fn",
                "config": {"steps": 10**6},
            },
            "scaling": {"min_workers": 1, "max_workers": 2},
            "checkpoint": {"every_steps": 1000},
        }
        run = client.runs.create(spec)
        with busy(options.beside):
            for _ in range(options.repeats):
                found.append(kill_once(service, run))
                print({name: round(value, 3) for name, value in found[-1].items()}, flush=True)
        cancel(run)
        log = (service.home / "cluster.log").read_text(errors="replace")
    released = [line for line in log.splitlines() if "normal class" in line]
    print("\n".join(released), flush=True)
    write(
        f"kills_beside_{options.beside}" if options.beside else "kills",
        {
            "recovery_s": summary([each["recovery_s"] for each in found]),
            "steps_lost": [each["steps_lost"] for each in found],
            "left class IDLE": len(released),
        },
    )
