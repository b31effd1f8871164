"""Replicas and their database are killed under load: what was acknowledged is there, nothing runs
twice, nobody gets a bad answer.

The history that is checked is what clients saw: every call with its answer. Ray is a stand-in that
counts what it is asked to run. On PostgreSQL there are two replicas and the database may die as
well; SQLite has one service, which holds it alone.
"""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from service.db.lease import LEASE_S
from tests.support import postgres_server
from tests.support.api_service import spec
from tests.support.fake_ray import FakeRay, serving
from tests.support.postgres_server import PostgresServer
from tests.support.replica import Replica
from tests.support.service_process import wait_for

CLIENTS = 4
STOPPED_S = LEASE_S + 2
"""How long a replica stands still: its lease, if it leads, is another's when it wakes."""
DATABASE_AWAY_S = 1.0
PACE_S = 0.25
"""A client's pause after each run. Without one, a test waits at its end for the start of thousands
of runs, one after the other."""
PATIENCE_S = 180.0
"""Longest wait for any one fact, on however slow a machine."""


@dataclass
class History:
    """What clients were told."""

    created: dict[str, str] = field(default_factory=dict)
    """Run by the name, and key, that it was asked for with."""
    cancelled: set[str] = field(default_factory=set)
    bad: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)


class Plane:
    """The replicas, the database behind them, and the clients in front. ``server`` is PostgreSQL's,
    and None with SQLite."""

    def __init__(self, shared: Path, server: PostgresServer | None, url: str, ray: FakeRay) -> None:
        self._server, self.ray = server, ray
        num_replicas = 1 if server is None else 2
        self.replicas = [
            Replica(shared / f"home-{number}", shared / "storage", url, ray.url)
            for number in range(num_replicas)
        ]
        self.history = History()
        self.faults: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def wait_until_ready(self) -> None:
        for replica in self.replicas:
            replica.wait_until_ready(PATIENCE_S)

    def clients(self, http: httpx.Client) -> Iterator[threading.Thread]:
        for number in range(CLIENTS):
            thread = threading.Thread(target=self._client, args=(http, random.Random(number)))
            thread.start()
            yield thread

    def stop_clients(self, threads: list[threading.Thread]) -> None:
        self._stopping.set()
        for thread in threads:
            thread.join(PATIENCE_S)

    def _client(self, http: httpx.Client, chance: random.Random) -> None:
        while not self._stopping.is_set():
            name = f"run-{next(self._numbers)}"
            while not self._stopping.is_set():
                answer = self.call(
                    http,
                    chance,
                    "POST",
                    "/v1/runs",
                    json=spec(name=name),
                    headers={"Idempotency-Key": name},
                )
                if answer is not None and answer.status_code in (200, 201):
                    with self._lock:
                        self.history.created[name] = answer.json()["id"]
                    if chance.random() < 0.2:
                        cancelled = self.call(
                            http, chance, "POST", f"/v1/runs/{answer.json()['id']}/cancel"
                        )
                        if cancelled is not None and cancelled.status_code == 202:
                            self.history.cancelled.add(answer.json()["id"])
                    self._stopping.wait(PACE_S)
                    break
                time.sleep(0.05)

    def call(
        self, http: httpx.Client, chance: random.Random, method: str, path: str, **more: object
    ) -> httpx.Response | None:
        """The answer of either replica; None where none came, and nothing is known."""
        url = chance.choice(self.replicas).url + path
        try:
            answer = http.request(method, url, **more)  # type: ignore[arg-type]
        except httpx.HTTPError as exc:
            self.history.statuses[type(exc).__name__] += 1
            return None
        self.history.statuses[str(answer.status_code)] += 1
        expected = answer.is_success or answer.status_code == 409
        if not expected and not (answer.status_code == 503 and answer.headers.get("Retry-After")):
            self.history.bad.append(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer

    # ---------------------------------------------------------------- what is done to them

    def break_once(self, chance: random.Random) -> None:
        """Each kind of fault, one after another."""
        faults = [self.kill_a_replica, self.stop_a_replica]
        if self._server is not None:
            faults[1:1] = [self.cut_the_connections, self.crash_the_database]
        for fault in faults:
            time.sleep(1 + chance.random())
            fault(chance)
            self.faults[fault.__name__] += 1

    def kill_a_replica(self, chance: random.Random) -> None:
        replica = chance.choice(self.replicas)
        replica.kill()
        time.sleep(chance.random())
        replica.start()
        replica.wait_until_ready(
            PATIENCE_S, "its /readyz: a service that begins while its database is away ends"
        )

    def stop_a_replica(self, chance: random.Random) -> None:
        """Stand still for longer than the lease lasts, and wake up."""
        replica = chance.choice(self.replicas)
        replica.process.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        replica.process.send_signal(signal.SIGCONT)

    def cut_the_connections(self, _chance: random.Random) -> None:
        assert self._server is not None
        self._server.drop_connections()

    def crash_the_database(self, _chance: random.Random) -> None:
        assert self._server is not None
        self._server.crash()
        # A replica that stands still, or has just begun, need not say so.
        up = [replica for replica in self.replicas if replica.process.poll() is None]
        answers = [
            httpx.get(f"{each.url}/readyz", timeout=PATIENCE_S, trust_env=False)
            for each in up
            if each.is_listening()
        ]
        time.sleep(DATABASE_AWAY_S)
        self._server.restart()
        assert all(
            answer.status_code == 503 and answer.json()["database"] == "down" for answer in answers
        ), "it says which is away"


@contextmanager
def control_plane(kind: str) -> Iterator[Plane]:
    """A plane that is ready, on a database of this kind."""
    shared = Path(tempfile.mkdtemp(prefix="es-plane-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, shared, ignore_errors=True)
        server, url = None, f"sqlite:///{shared / 'everstep.db'}"
        if kind == "postgresql":
            programs = postgres_server.binaries()
            if programs is None:
                pytest.skip("PostgreSQL is not installed: apt-get install -y postgresql")
            server = stack.enter_context(postgres_server.running(programs, durable=True))
            url = stack.enter_context(server.database())
        ray = stack.enter_context(serving(FakeRay()))
        ray.nodes.append(ray.node("n2", {"CPU": 100_000.0}))
        plane = Plane(shared, server, url, ray)
        for replica in plane.replicas:
            stack.callback(replica.kill)
        plane.wait_until_ready()
        yield plane


LONG = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        ("postgresql", 1),
        pytest.param("postgresql", 5, marks=LONG),
        pytest.param("sqlite", 5, marks=LONG),
    ],
)
def test_nothing_acknowledged_is_lost_and_nothing_runs_twice(kind: str, rounds: int) -> None:
    chance = random.Random(rounds)
    with (
        control_plane(kind) as plane,
        httpx.Client(headers=plane.replicas[0].headers, timeout=30, trust_env=False) as http,
    ):
        threads = list(plane.clients(http))
        try:
            for number in range(rounds):
                began = time.monotonic()
                plane.break_once(chance)
                print(f"round {number + 1}: {time.monotonic() - began:.0f} s")
        finally:
            plane.stop_clients(threads)
        plane.wait_until_ready()
        began = time.monotonic()
        check(plane, http)
        print(f"checked in {time.monotonic() - began:.0f} s")
        summary = (
            f"{len(plane.history.created)} runs and {len(plane.history.cancelled)} cancels "
            "acknowledged"
        )
        print(f"{dict(plane.faults)}; {summary}; {dict(plane.history.statuses)}")


def check(plane: Plane, http: httpx.Client) -> None:
    """Everything that clients were told is so, on the last replica too; and Ray was asked to run
    each run once."""
    history = plane.history
    errors = [replica.errors() for replica in plane.replicas] if history.bad else []
    assert history.bad == [] and len(history.created) > 20, (
        f"{history.bad[:3]} {history.statuses} {errors}"
    )
    base = plane.replicas[-1].url

    def found() -> dict[str, dict[str, object]]:
        runs, cursor = {}, None
        while True:
            params = {"limit": "500", **({"cursor": cursor} if cursor else {})}
            page = http.get(f"{base}/v1/runs", params=params).json()
            runs |= {run["id"]: run for run in page["items"]}
            cursor = page["next_cursor"]
            if cursor is None:
                return runs

    runs = found()
    names = Counter(run["name"] for run in runs.values())
    assert [name for name, count in names.items() if count > 1] == [], "a key made two runs"
    lost = {
        name: run_id
        for name, run_id in history.created.items()
        if run_id not in runs or runs[run_id]["name"] != name
    }
    assert lost == {}, "acknowledged, and gone"
    assert {runs[run_id]["status"] for run_id in history.cancelled} <= {"CANCELLED", "STOPPING"}

    def is_queued() -> bool:
        return bool(
            http.get(f"{base}/v1/runs", params={"status": "QUEUED", "limit": "1"}).json()["items"]
        )

    while is_queued():
        num_jobs = len(plane.ray.jobs)
        wait_for(
            lambda num=num_jobs: not is_queued() or len(plane.ray.jobs) > num,
            PATIENCE_S,
            "the start of another run",
            every_s=0.5,
        )
    submissions = Counter(job.rpartition("-")[0] for job in plane.ray.jobs)
    assert [run_id for run_id, count in submissions.items() if count > 1] == [], (
        "two submissions of one run"
    )
    assert set(submissions) <= runs.keys(), "a job without a run"
