"""What people wait for at the start: seconds from ``everstep serve`` to the first answer and to a
ready cluster, and from POST to the first step, by its parts.

python -m benchmarks start --before DIRECTORY    # by turns with another checkout
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.main_job import DIGITS
from benchmarks.report import summary, write
from tests.support.service_process import ServiceProcess, wait_for

SPEC = {**DIGITS, "train": {**DIGITS["train"], "epochs": 2}}
LOOK_S = 0.02
START_S = 300.0
PARTS = ("queued_s", "job_s", "ranks_s", "model_s", "data_s", "step_s")


def measure(tree: Path, num_runs: int) -> list[dict[str, float]]:
    """Start the service of a checkout, and train a run after the other. Return seconds by name: one
    row of the start, and one of each run."""
    service = ServiceProcess(nodes=2, env={"PYTHONPATH": str(tree)})
    try:
        began = time.monotonic()
        with contextlib.chdir(tree):
            service.launch()
        wait_for(lambda: _answers(service), START_S, "the first answer", every_s=LOOK_S)
        rows = [{"first_answer_s": time.monotonic() - began}]
        wait_for(lambda: _is_ready(service), START_S, "a ready cluster", every_s=LOOK_S)
        rows[0]["cluster_ready_s"] = time.monotonic() - began
        return rows + [_first_start(service) for _ in range(num_runs)]
    finally:
        service.stop()
        service._clean()


def _answers(service: ServiceProcess) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{service.url}/healthz", timeout=60, trust_env=False).is_success
    return False


def _is_ready(service: ServiceProcess) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return bool(service.cluster()["state"] == "ready")
    return False


def _first_start(service: ServiceProcess) -> dict[str, float]:
    run = service.client().runs.create(SPEC)
    run.wait(timeout_s=START_S)
    start = run.goodput().first_start
    assert start is not None
    parts = {name: getattr(start, name) for name in PARTS}
    return {**parts, "post_to_first_step_s": sum(parts.values())}


def figures(turns: Sequence[list[dict[str, float]]]) -> dict[str, Any]:
    """Return the summaries of a checkout's turns: starts, first runs and later runs apart."""

    def of(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
        return {name: summary([row[name] for row in rows]) for name in rows[0]}

    later = [row for turn in turns for row in turn[2:]]
    return {
        "serve": of([turn[0] for turn in turns]),
        "first_run": of([turn[1] for turn in turns]),
        **({"later_runs": of(later)} if later else {}),
    }


def ratios(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Return the ratios of medians, after over before."""
    return {
        f"{kind}.{name}": round(after[kind][name]["median"] / before[kind][name]["median"], 3)
        for kind in before
        for name in ("first_answer_s", "cluster_ready_s", "post_to_first_step_s")
        if name in before[kind]
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3, help="starts of each service")
    parser.add_argument("--runs", type=int, default=3, help="runs after each start")
    parser.add_argument("--before", type=Path, help="another checkout to compare with, by turns")
    options = parser.parse_args(argv)
    trees = {"after": Path.cwd()}
    if options.before is not None:
        trees = {"before": options.before.resolve(), **trees}
    turns: dict[str, list[list[dict[str, float]]]] = {name: [] for name in trees}
    loads = []
    for _ in range(options.repeats):
        for name, tree in trees.items():
            loads.append(os.getloadavg()[0])
            turns[name].append(measure(tree, options.runs))
            print(name, turns[name][-1], flush=True)
    found = {name: figures(rows) for name, rows in turns.items()}
    results: dict[str, Any] = {**found, "load": summary(loads)}
    if "before" in found:
        results["ratios"] = ratios(found["before"], found["after"])
    write("start", results)
