"""What the reconciler costs: ``python -m benchmarks reconciler [--runs 5000] [--events 100000]``.

A tick over many live runs that train and have nothing new to tell, one over as many that wait, and how fast the events of a journal
become rows. Ray is a stand-in, in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from sqlalchemy import insert

from benchmarks import report
from benchmarks.api_seed import SPEC
from everstep.events import EventKind
from everstep.spec import parse_spec
from everstep.wire import RunStatus
from service.db.ids import new_run_id
from service.db.new_run import new_row
from service.db.tables import runs
from service.reconciler.decide import submission_id
from service.reconciler.tail import JournalTail
from storage.journal import JournalEvent, JournalWriter
from tests.unit.fake_ray import FakeRay, serving
from tests.unit.reconciler_world import World, world

TICKS: Final = 9
POINTS: Final = 1
"""Steps that one event tells of."""


def fill(here: World, num_runs: int, status: RunStatus) -> list[str]:
    """That many live runs, each with a journal of two events where it trains."""
    spec = parse_spec(SPEC).model_dump(mode="json")
    rows = []
    for index in range(num_runs):
        row = new_row(new_run_id(here.now), spec, "tok_seed", here.now - num_runs + index).columns()
        if status == RunStatus.RUNNING:
            row |= {
                "submission": 1,
                "ray_job_id": "j",
                "submitted_at": here.now,
                "attempt": 1,
                "world_size": 1,
                "journal_submission": 1,
            }
        rows.append(row | {"status": status.value})
    for start in range(0, num_runs, 1000):
        with here.database.write() as connection:
            connection.execute(insert(runs), rows[start : start + 1000])
    if status == RunStatus.RUNNING:
        for row in rows:
            here.write(row["id"], 1, (EventKind.ATTEMPT_STARTED, {"world_size": 1, "workers": []}))
    return [row["id"] for row in rows]


def tick(num_runs: int, status: RunStatus) -> dict[str, Any]:
    """Seconds of a tick once everything that there is was read."""
    command = [sys.executable, "-m", "benchmarks.reconciler", "--stand-in"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        return asyncio.run(_ticks(num_runs, status, host))


async def _ticks(num_runs: int, status: RunStatus, host: subprocess.Popen[str]) -> dict[str, Any]:
    home = Path(tempfile.mkdtemp(prefix="es-tick-"))
    assert host.stdin is not None and host.stdout is not None
    try:
        async with world(home, host.stdout.readline().strip()) as here:
            found = fill(here, num_runs, status)
            host.stdin.write(" ".join(submission_id(name, 1) for name in found if status == RunStatus.RUNNING) + "\n")
            host.stdin.flush()
            host.stdout.readline()
            for _ in range(4):
                await here.reconciler.tick()
            took, cpu = [], []
            for _ in range(TICKS):
                await asyncio.sleep(0.5)
                began, used = time.perf_counter(), time.process_time()
                await here.reconciler.tick()
                took.append(time.perf_counter() - began)
                cpu.append(time.process_time() - used)
    finally:
        host.stdin.close()
        shutil.rmtree(home, ignore_errors=True)
    return {"tick_s": report.summary(took), "cpu_s": report.summary(cpu)}


async def tail(num_events: int) -> dict[str, Any]:
    """Events of one run's journal that become rows in a second."""
    home, rates = Path(tempfile.mkdtemp(prefix="es-tail-")), []
    try:
        async with world(home, "http://127.0.0.1:1") as here:
            for _ in range(3):
                [run_id] = fill(here, 1, RunStatus.RUNNING)
                told = [
                    JournalEvent(
                        kind=EventKind.METRICS,
                        at=here.now,
                        submission=1,
                        attempt=1,
                        data={"points": [{"step": n * POINTS + i, "at": here.now, "values": {"loss": 0.5}} for i in range(POINTS)]},
                        source="rank-0",
                        source_n=n + 1,
                    )
                    for n in range(num_events)
                ]
                with JournalWriter(here.storage.run_dir(run_id), 1) as journal:
                    journal.append(told)
                reader, began = JournalTail(here.storage, here.events), time.perf_counter()
                row = here.get(run_id)
                while row.journal_n < num_events:
                    row, _ = reader.drain(row)
                rates.append(num_events / (time.perf_counter() - began))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return {"events_per_s": report.summary(rates), "points_per_s": report.summary([rate * POINTS for rate in rates])}


def stand_in() -> None:
    """Serve as Ray's dashboard, with the jobs that the first line of input names, until the input ends."""
    with serving(FakeRay()) as ray:
        print(ray.url, flush=True)
        for line in sys.stdin:
            for job_id in line.split():
                run_id, _, submission = job_id.rpartition("-s")
                about: dict[str, Any] = {"metadata": {"run_id": run_id, "submission": str(int(submission))}, "entrypoint": "x"}
                job = {
                    "submission_id": job_id,
                    "status": "RUNNING",
                    "message": "",
                    "driver_node_id": None,
                    "driver_exit_code": None,
                }
                ray.jobs[job_id] = about | job
            print("ready", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks reconciler")
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--events", type=int, default=30_000)
    parser.add_argument("--stand-in", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.stand_in:
        stand_in()
        return
    results = {
        "training": tick(options.runs, RunStatus.RUNNING),
        "waiting": tick(options.runs, RunStatus.QUEUED),
        "tail": asyncio.run(tail(options.events)),
    }
    report.write("reconciler", results)


if __name__ == "__main__":
    main()
