"""How fast the control plane answers: ``python -m benchmarks api [--database sqlite|postgresql]
[--only get,list,sse,post]``.

The service is a process of its own, with its reconciler; beside it a stand-in for Ray's dashboard,
of a cluster too small for what is submitted, so that runs queue. 16 clients ask again as soon as
they have their answer, over kept connections.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from benchmarks import report
from benchmarks.api_seed import PROJECTS, SPEC, TEAMS, Seeded, seed
from benchmarks.http_loop import closed_loop, lines_of_stream, percentile
from benchmarks.ray_stand_in import ray_stand_in
from everstep.wire.events import EventKind
from service.api.answers import encode_run_cursor
from service.api.streams import MOST_OF_CALLER
from service.db.engine import Database
from service.db.node_marks import StorageRecords
from service.storage_identity import StorageGate
from storage.filesystem import open_storage
from storage.logs.journal import JournalEvent
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from tests.support import postgres_server
from tests.support.replica import Replica

CLIENTS: Final = 16
FOLLOWERS: Final = 500
HEARD_S: Final = 30.0
"""Longest wait for the last follower to hear the last event."""


@contextmanager
def seeded_service(kind: str, num_runs: int) -> Iterator[tuple[Replica, Seeded]]:
    """A service on a new database of ``num_runs`` runs."""
    home = Path(tempfile.mkdtemp(prefix="es-api-"))
    programs = postgres_server.binaries()
    if kind == "postgresql" and programs is None:
        sys.exit("PostgreSQL is not installed: apt-get install -y postgresql")
    server = (
        postgres_server.running(programs, durable=True)
        if kind == "postgresql" and programs
        else nullcontext()
    )
    try:
        with ExitStack() as stack:
            postgresql, ray = stack.enter_context(server), stack.enter_context(ray_stand_in())
            url = (
                stack.enter_context(postgresql.database())
                if postgresql
                else f"sqlite:///{home / 'everstep.db'}"
            )
            database = Database(url)
            database.migrate()
            # The runs of a database that has no storage yet would be missed there.
            storage = open_storage(str(home / "storage"))
            StorageGate(storage, StorageRecords(database)).check()
            began = time.perf_counter()
            found = seed(database, num_runs)
            database.close()
            print(
                f"{kind}: {num_runs} runs seeded in {time.perf_counter() - began:.1f} s", flush=True
            )
            # Seeded runs have no directories in which checkpoints could be read back.
            service = Replica(
                home, home / "storage", url, ray.url, {"EVERSTEP_SCRUB_MB_PER_S": "0"}
            )
            stack.callback(service.stop)
            service.wait_until_ready(60)
            yield service, found
    finally:
        shutil.rmtree(home, ignore_errors=True)


# ---------------------------------------------------------------- what is asked


def get_one(found: Seeded) -> Callable[[], tuple[str, str, bytes]]:
    chance = random.Random(2)
    return lambda: ("GET", f"/v1/runs/{chance.choice(found.ids)}", b"")


def get_list(found: Seeded) -> Callable[[], tuple[str, str, bytes]]:
    """Every filter in turn, at any page: the cursor is that of a run at random."""
    chance = random.Random(3)
    filters: list[Callable[[], str]] = [
        lambda: "",
        lambda: f"project={chance.choice(PROJECTS)}",
        lambda: f"status={chance.choice(('SUCCEEDED', 'FAILED', 'CANCELLED'))}",
        lambda: "status=PAUSED,FAILED",
        lambda: f"name=digits-{chance.randrange(2000)}",
        lambda: f"tag=team%3D{chance.choice(TEAMS)}",
        lambda: f"tag=sweep%3D{chance.randrange(500)}",
        lambda: f"project={chance.choice(PROJECTS)}&status=SUCCEEDED&tag=team%3Dvision",
    ]

    def ask() -> tuple[str, str, bytes]:
        index = chance.randrange(len(found.ids))
        cursor = encode_run_cursor(found.created_at[index], found.ids[index])
        return "GET", f"/v1/runs?{chance.choice(filters)()}&cursor={cursor}", b""

    return ask


def post() -> Callable[[], tuple[str, str, bytes]]:
    numbers = itertools.count()
    return lambda: (
        "POST",
        "/v1/runs",
        json.dumps(SPEC | {"name": f"posted-{next(numbers)}"}).encode(),
    )


def measured(
    service: Replica, ask: Callable[[], tuple[str, str, bytes]], seconds: float, status: int
) -> dict[str, float]:
    """Requests a second and latencies in milliseconds of a closed loop; what the service used
    meanwhile."""
    closed_loop(service.port, service.headers, CLIENTS, ask, 1.0, status)
    usage = psutil.Process(service.process.pid)
    before, began = sum(usage.cpu_times()[:2]), time.perf_counter()
    latencies = closed_loop(service.port, service.headers, CLIENTS, ask, seconds, status)
    took = time.perf_counter() - began
    found = {
        f"p{share}_ms": round(percentile(latencies, share / 100) * 1000, 2) for share in (50, 99)
    }
    found["longest_ms"] = round(max(latencies) * 1000, 1)
    found["cores"] = round((sum(usage.cpu_times()[:2]) - before) / took, 2)
    return {"per_s": round(len(latencies) / took, 1), **found}


# ---------------------------------------------------------------- followers


async def followers(service: Replica, seconds: float) -> dict[str, float]:
    """Many followers of one run whose driver tells something ten times a second: how late the
    latest of them hears of it."""
    async with httpx.AsyncClient(base_url=service.url, headers=service.headers) as http:
        answer = await http.post("/v1/runs", json=SPEC | {"name": "followed", "priority": 9})
        run_id = answer.json()["id"]
        while (await http.get(f"/v1/runs/{run_id}")).json()["status"] == "QUEUED":  # noqa: ASYNC110  it is another process
            await asyncio.sleep(0.1)
        viewers = []
        for number in range(-(-FOLLOWERS // MOST_OF_CALLER)):
            body = {"name": f"viewer-{number}", "role": "viewer", "project": "default"}
            made = (await http.post("/v1/tokens", json=body)).json()
            viewers.append({"Authorization": f"Bearer {made['token']}"})
    late: list[float] = []
    heard: list[int] = []
    tasks = [
        asyncio.create_task(
            _follow(service.port, viewers[number % len(viewers)], run_id, late, heard)
        )
        for number in range(FOLLOWERS)
    ]
    await asyncio.sleep(2.0)
    usage = psutil.Process(service.process.pid)
    before, began = sum(usage.cpu_times()[:2]), time.perf_counter()
    num_events = await _append_events(
        RunDir(open_storage(str(service.home / "storage")), run_id), seconds
    )
    await asyncio.wait(tasks, timeout=HEARD_S)
    cores = (sum(usage.cpu_times()[:2]) - before) / (time.perf_counter() - began)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    expected = num_events * FOLLOWERS
    assert len(heard) == expected, f"{len(heard)} of {expected} events were heard"
    rss_mb = usage.memory_info().rss / 1e6
    longest = {"longest_s": round(max(late), 3), "p99_s": round(percentile(late, 0.99), 3)}
    return {**longest, "events": num_events, "cores": round(cores, 2), "rss_mb": round(rss_mb, 1)}


async def _append_events(run_dir: RunDir, seconds: float) -> int:
    """Append the events of a run that trains for so long and then succeeds. Return how many of them
    have metrics."""
    num_sent, give_up = 0, time.perf_counter() + seconds

    def event(kind: EventKind, **data: Any) -> JournalEvent:
        return JournalEvent(
            kind=kind,
            at=time.time(),
            submission=1,
            attempt=1,
            data=data,
            source="x",
            source_n=num_sent,
        )

    with JournalWriter(run_dir, 1) as journal:
        while time.perf_counter() < give_up:
            num_sent += 1
            metrics = event(
                EventKind.METRICS,
                points=[{"step": num_sent, "at": time.time(), "values": {"loss": 0.5}}],
            )
            await asyncio.to_thread(journal.append, [metrics])
            await asyncio.sleep(0.1)
        num_sent += 1
        # The next one to be followed finds the cluster free.
        await asyncio.to_thread(
            journal.append,
            [event(EventKind.FINISHED, outcome="succeeded", reason=None, step=num_sent)],
        )
    return num_sent - 1


async def _follow(
    port: int, headers: dict[str, str], run_id: str, late: list[float], heard: list[int]
) -> None:
    async for line in lines_of_stream(port, headers, f"/v1/runs/{run_id}/events"):
        if line.startswith(b"data: ") and b'"kind":"metrics"' in line:
            event = json.loads(line[6:])
            heard.append(event["seq"])
            late.append(time.time() - event["data"]["points"][0]["at"])
        elif line.startswith(b"data: ") and b'"to":"SUCCEEDED"' in line:
            return


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks api")
    parser.add_argument("--database", choices=("sqlite", "postgresql", "both"), default="both")
    parser.add_argument("--runs", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="get,list,sse,post")
    options = parser.parse_args(argv)
    results: dict[str, Any] = {}
    for kind in ("sqlite", "postgresql") if options.database == "both" else (options.database,):
        with seeded_service(kind, options.runs) as (service, found):
            asks = {
                "get": (get_one(found), 200),
                "list": (get_list(found), 200),
                "post": (post(), 201),
            }
            for name in options.only.split(","):
                tries = []
                for _ in range(options.repeats):
                    if name == "sse":
                        tries.append(asyncio.run(followers(service, options.seconds)))
                    else:
                        tries.append(
                            measured(service, asks[name][0], options.seconds, asks[name][1])
                        )
                    print(kind, name, tries[-1], flush=True)
                results[f"{kind}_{name}"] = {
                    key: report.summary([each[key] for each in tries]) for key in tries[0]
                }
    report.write("api", results)


if __name__ == "__main__":
    main()
