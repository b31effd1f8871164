"""What the reconciler costs: ``python -m benchmarks reconciler [--runs 5000] [--events 100000]``.

A tick over many live runs that train and have nothing new to tell, one over as many that wait, and
how fast the events of a journal become rows. Ray is a stand-in, in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from sqlalchemy import insert

from benchmarks import report
from benchmarks.api_seed import SPEC
from benchmarks.ray_stand_in import StandIn, ray_stand_in
from everstep.spec.parsing import parse_spec
from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from service.db.ids import new_id
from service.db.runs import new_row
from service.db.tables import runs
from service.reconciler.facts import submission_id
from service.reconciler.tail import JournalTail
from storage.logs.journal import JournalEvent
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from tests.support.reconciler_world import World, world

TICKS: Final = 9
POINTS: Final = 1
"""Steps that one event tells of."""


def fill(here: World, num_runs: int, status: RunStatus) -> list[str]:
    """That many live runs, each with a journal of two events where it trains."""
    spec = parse_spec(SPEC)
    rows = []
    for index in range(num_runs):
        created_at = here.now - num_runs + index  # ids of one moment would collide
        row = new_row(new_id("run", created_at), spec, "tok_seed", created_at).columns()
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
    with ray_stand_in() as ray:
        return asyncio.run(_ticks(num_runs, status, ray))


async def _ticks(num_runs: int, status: RunStatus, ray: StandIn) -> dict[str, Any]:
    home = Path(tempfile.mkdtemp(prefix="es-tick-"))
    try:
        async with world(home, ray.url) as here:
            found = fill(here, num_runs, status)
            ray.run_jobs(submission_id(name, 1) for name in found if status == RunStatus.RUNNING)
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
        shutil.rmtree(home, ignore_errors=True)
    return {"tick_s": report.summary(took), "cpu_s": report.summary(cpu)}


async def tail(num_events: int) -> dict[str, Any]:
    """Events of one run's journal that become rows in a second."""
    home, rates = Path(tempfile.mkdtemp(prefix="es-tail-")), []
    try:
        async with world(home, "http://127.0.0.1:1") as here:
            for _ in range(3):
                [run_id] = fill(here, 1, RunStatus.RUNNING)
                written = [
                    JournalEvent(
                        kind=EventKind.METRICS,
                        at=here.now,
                        submission=1,
                        attempt=1,
                        data={
                            "points": [
                                {"step": n * POINTS + i, "at": here.now, "values": {"loss": 0.5}}
                                for i in range(POINTS)
                            ]
                        },
                        source="rank-0",
                        source_n=n + 1,
                    )
                    for n in range(num_events)
                ]
                with JournalWriter(RunDir(here.storage, run_id), 1) as journal:
                    journal.append(written)
                reader, began = JournalTail(here.storage, here.events), time.perf_counter()
                row = here.get(run_id)
                while row.journal_n < num_events:
                    row, _ = reader.drain(row)
                rates.append(num_events / (time.perf_counter() - began))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return {
        "events_per_s": report.summary(rates),
        "points_per_s": report.summary([rate * POINTS for rate in rates]),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks reconciler")
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--events", type=int, default=30_000)
    options = parser.parse_args(argv)
    results = {
        "training": tick(options.runs, RunStatus.RUNNING),
        "waiting": tick(options.runs, RunStatus.QUEUED),
        "tail": asyncio.run(tail(options.events)),
    }
    report.write("reconciler", results)


if __name__ == "__main__":
    main()
