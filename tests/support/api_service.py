"""A real API for tests: a database (SQLite unless named) and storage of its own, uvicorn on a free
port, a clock that tests set."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import uvicorn

from everstep.wire import ClusterInfo, Node, NodeState
from everstep.wire.events import EventKind
from service.annex import Annex
from service.annexes.registry import ANNEXES
from service.api.callers import Door, TokenUse
from service.api.log_views import LogViews
from service.api.streams import EventFeed, Followers
from service.cluster.cluster_view import ClusterView
from service.cluster.ray_jobs import RayJobs
from service.db.audit import AuditStore
from service.db.events import EventStore, SeriesStore
from service.db.node_marks import NodeMarks
from service.db.projects import ProjectStore
from service.db.runs import RunStore
from service.db.tokens import SessionStore, TokenStore
from service.figures import RunFigures
from service.model.rows import Role
from service.model.run_rows import RunRow
from service.process.app import composed, create_app
from service.process.http import UNREAD_S, drop_who_reads_nothing
from service.settings import Settings
from service.storage_identity import StorageGate
from storage.filesystem import open_storage
from storage.logs.journal import JournalEvent
from tests.support.prepared_database import prepared_database

NOON = 1_780_000_000.0


class ManualClock:
    """Unix seconds that stand still until a test moves them."""

    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class OneNodeCluster(ClusterView):
    """A cluster that the API may be asked about; of one node, unless a test sets ``nodes``."""

    dashboard_url: str | None = "http://ray.example:8265"

    def __init__(self) -> None:
        self.available = True
        self.nodes = (self.node("node-1"),)
        self.coming_back: tuple[datetime, ...] = ()

    @staticmethod
    def node(node_id: str, state: NodeState = "ALIVE") -> Node:
        return Node(
            id=node_id,
            hostname="host",
            ip="10.0.0.1",
            state=state,
            is_head=False,
            resources_total={"CPU": 2.0},
            runs=(),
        )

    async def cluster(self) -> ClusterInfo:
        return ClusterInfo(
            available=self.available,
            address="10.0.0.1:6379",
            dashboard_url=self.dashboard_url,
            ray_version="2.60.0",
            nodes=self.nodes if self.available else (),
            coming_back=self.coming_back,
        )


def spec(**fields: Any) -> dict[str, Any]:
    """The smallest spec, with fields set."""
    task = {
        "name": "image_classification",
        "model": {"name": "mini_resnet"},
        "data": {"name": "digits"},
    }
    return {"name": "digits", "task": task} | fields


class Journal:
    """What a submission's journal would say, as the tail hands it over."""

    def __init__(self, submission: int = 1, attempt: int = 1, at: float = NOON) -> None:
        self.submission = submission
        self.attempt = attempt
        self.at = at
        self.n = 0

    def event(self, kind: EventKind, /, at: float | None = None, **data: Any) -> JournalEvent:
        self.n += 1
        self.at = self.at if at is None else at
        return JournalEvent(
            kind=kind,
            at=self.at,
            submission=self.submission,
            attempt=self.attempt,
            data=data,
            source="driver",
            source_n=self.n,
            n=self.n,
        )

    def start(self, step: int = 0, world_size: int = 2, **restored: Any) -> list[JournalEvent]:
        """An attempt from its workers to its first step."""
        workers = [
            {"rank": rank, "node_id": f"node-{rank + 1}", "node_ip": "10.0.0.1", "pid": 100 + rank}
            for rank in range(world_size)
        ]
        restored = {
            "step": step,
            "epoch": step // 10,
            "source": "fresh",
            "checkpoint": None,
            "rejected": [],
        } | restored
        return [
            self.event(EventKind.ATTEMPT_STARTED, world_size=world_size, workers=workers),
            self.event(EventKind.RESTORED, **restored),
            self.event(EventKind.TRAINING_STARTED, total_steps=30, steps_per_epoch=10),
        ]

    def steps(self, *steps: int, at: float | None = None, **values: float | None) -> JournalEvent:
        self.at = self.at if at is None else at
        values = values or {"loss": 0.5}
        return self.event(
            EventKind.METRICS,
            points=[{"step": step, "at": self.at, "values": values} for step in steps],
        )

    def checkpoint(self, step: int, **metrics: float) -> JournalEvent:
        return self.event(
            EventKind.CHECKPOINT_COMMITTED,
            step=step,
            epoch=step // 10,
            name=f"step-{step:09d}.s{self.submission:03d}.a001",
            size_bytes=1000 + step,
            digest="ab" * 32,
            metrics=metrics,
            stall_s=0.0,
            write_s=0.0,
        )


class ApiService:
    """The service's API over HTTP. ``http`` carries the admin's token; ``client(token)``
    another's."""

    def __init__(
        self,
        directory: Path,
        *,
        drills: bool = False,
        database_url: str | None = None,
        unread_s: float = UNREAD_S,
        annexes: Sequence[Annex] = ANNEXES,
    ) -> None:
        self.annexes = annexes
        self.drills = drills
        self.unread_s = unread_s
        self.home = directory / "home"
        self.clock = ManualClock()
        self.database = prepared_database(
            database_url or f"sqlite:///{directory / 'everstep.db'}", annexes
        )
        self.storage = open_storage(str(directory / "storage"))
        self.cluster = OneNodeCluster()
        self.lag_s: float | None = 0.25
        self.figures = RunFigures(self.clock)

    async def __aenter__(self) -> Self:
        self.parts = parts = composed(
            Settings(home=self.home, ray_address="http://127.0.0.1:9", drills=self.drills),
            self.database,
            self.storage,
            self.cluster,
            RayJobs(lambda: None),
            lag_s=lambda: self.lag_s,
            figures=self.figures,
            annexes=self.annexes,
            clock=self.clock,
        )
        self.runs, self.events, self.series = parts[RunStore], parts[EventStore], parts[SeriesStore]
        self.tokens, self.sessions = parts[TokenStore], parts[SessionStore]
        self.audit, self.projects = parts[AuditStore], parts[ProjectStore]
        self.feed, self.followers, self.logs = parts[EventFeed], parts[Followers], parts[LogViews]
        self.door, self.token_use = parts[Door], parts[TokenUse]
        self.node_marks, self.storage_gate = parts[NodeMarks], parts[StorageGate]
        self.storage_gate.check()  # as the service does before it serves
        self._stack = AsyncExitStack()
        # asyncio turns Nagle's algorithm off only for sockets that say that they are TCP: else
        # every answer waits 40 ms.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        drop_who_reads_nothing(listener, self.unread_s)
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(create_app(self.parts), log_config=None, lifespan="on")
        )
        self._serving = asyncio.create_task(self._server.serve([listener]))
        async with asyncio.timeout(60):
            while not self._server.started:  # noqa: ASYNC110  uvicorn has no event for it
                await asyncio.sleep(0.005)
        self.http = await self.client(self.token("admin"))
        return self

    def set(self, **values: object) -> None:
        """Change settings of the service, also those that follow from others."""
        self.parts.add(self.settings.model_copy(update=values))

    @property
    def settings(self) -> Settings:
        return self.parts[Settings]

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        self.feed.close()
        self._server.should_exit = True
        await self._serving
        self.database.close()

    def token(self, role: Role, project: str | None = None, **options: Any) -> str:
        return self.tokens.create(f"{role} of {project}", role, project, **options)[1]

    def announce(self, monkeypatch: pytest.MonkeyPatch, role: Role = "admin") -> None:
        """Let commands and clients find this service by the environment, with a token of this
        role."""
        monkeypatch.setenv("EVERSTEP_HOME", str(self.home))
        monkeypatch.setenv("EVERSTEP_URL", self.url)
        monkeypatch.setenv("EVERSTEP_TOKEN", self.token(role))

    async def client(self, token: str | None) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Certificates, which plain HTTP does not need, take longer to load than most tests to run.
        client = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=20, trust_env=False, verify=False
        )
        return await self._stack.enter_async_context(client)

    async def create(self, **fields: Any) -> str:
        """Submit a run; its id."""
        answer = await self.http.post("/v1/runs?create_project=true", json=spec(**fields))
        assert answer.status_code == 201, answer.text
        run_id: str = answer.json()["id"]
        return run_id

    async def running(self, **fields: Any) -> tuple[str, Journal]:
        """A run that trains, and its journal so far."""
        run_id = await self.create(**fields)
        self.runs.claim_submission(run_id, 0)
        self.runs.record_job(run_id, 1, f"{run_id}-s001")
        journal = Journal(at=self.clock.now)
        self.apply(run_id, [*journal.start(), journal.steps(1)])
        return run_id, journal

    def apply(self, run_id: str, events: Sequence[JournalEvent]) -> RunRow:
        return self.events.apply_journal(
            run_id, events[-1].submission, events, f"cursor-{events[-1].n}"
        )

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()
