"""A reconciler with a real database and storage and a fake dashboard; as a program, it makes one
tick and may be killed in it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from everstep.spec.parsing import parse_spec
from everstep.wire.events import EventKind
from service.annexes.nodes.care import DEFAULT_RULE, INTERVAL_S, NodeCare
from service.annexes.nodes.store import MarksFile, NodeMarkStore
from service.cluster.ray_jobs import RayEndpoint, RayJobs
from service.db.events import EventStore
from service.db.lease import LeaseStore
from service.db.projects import ProjectStore
from service.db.runs import RunStore
from service.model.run_rows import RunRow
from service.reconciler import execute, ray_poller
from service.reconciler.loop import Background, Leadership, Reconciler
from service.storage_identity import StorageGate
from storage.filesystem import open_storage
from storage.logs.journal import JournalEvent
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from tests.support.fake_ray import FakeRay
from tests.support.prepared_database import prepared_database

STARTED = (
    (EventKind.ATTEMPT_STARTED, {"world_size": 2, "workers": []}),
    (
        EventKind.RESTORED,
        {"step": 0, "epoch": 0, "source": "fresh", "checkpoint": None, "rejected": []},
    ),
    (EventKind.TRAINING_STARTED, {"total_steps": 10, "steps_per_epoch": 10}),
)


def step_done(step: int) -> tuple[EventKind, dict[str, Any]]:
    return EventKind.METRICS, {"points": [{"step": step, "at": 1.0, "values": {"loss": 0.5}}]}


METRICS = step_done(7)
SUCCEEDED = (EventKind.FINISHED, {"outcome": "succeeded", "reason": None, "step": 10})


class World:
    """One service's state on disk, with its reconciler."""

    def __init__(self, home: Path, ray: RayJobs, database_url: str | None = None) -> None:
        """``database_url`` is one that several replicas share: they lead by turns. None is a SQLite
        of one's own in ``home``."""
        self.database = prepared_database(database_url or f"sqlite:///{home / 'everstep.db'}")
        self.leadership = Leadership(LeaseStore(self.database)) if database_url else None
        self.storage = open_storage(str(home / "storage"))
        self.now = time.time()
        self.runs, self.events = (
            RunStore(self.database, self.clock),
            EventStore(self.database, self.clock),
        )
        self.marks = NodeMarkStore(self.database, self.clock)
        self.projects = ProjectStore(self.database, self.clock)
        self._ray = ray
        self.restart()

    def restart(self) -> None:
        """Reconcile as a process that begins anew."""
        mine = self.database.guarded(self.leadership.check) if self.leadership else self.database
        runs, marks = RunStore(mine, self.clock), NodeMarkStore(mine, self.clock)
        file = MarksFile(self.storage, marks, StorageGate(self.storage, runs.storage).require)
        care = NodeCare(marks, file, self._ray, DEFAULT_RULE, self.clock)
        self.reconciler = Reconciler(
            runs,
            EventStore(mine, self.clock),
            marks,
            ProjectStore(mine, self.clock),
            self.storage,
            self._ray,
            leadership=self.leadership,
            beside=[Background(INTERVAL_S, care.check)],
            public_url="https://everstep.example",
            clock=self.clock,
        )

    def clock(self) -> float:
        return self.now

    def create(self, **values: Any) -> RunRow:
        task = {
            "name": "image_classification",
            "model": {"name": "mini_resnet"},
            "data": {"name": "digits"},
        }
        return self.runs.create(parse_spec({"name": "a", "task": task, **values}), "tok_test")[0]

    def get(self, run_id: str) -> RunRow:
        row = self.runs.get(run_id)
        assert row is not None
        return row

    def write(
        self,
        run_id: str,
        submission: int,
        *entries: tuple[EventKind, dict[str, Any]],
        first: int = 1,
    ) -> None:
        """What a driver would put into its journal."""
        with JournalWriter(RunDir(self.storage, run_id), submission) as journal:
            journal.append(
                [
                    JournalEvent(
                        kind=kind,
                        at=self.now,
                        submission=submission,
                        attempt=1,
                        data=data,
                        source="driver",
                        source_n=first + index,
                    )
                    for index, (kind, data) in enumerate(entries)
                ]
            )


@asynccontextmanager
async def world(home: Path, url: str, database_url: str | None = None) -> AsyncIterator[World]:
    async with RayJobs(lambda: RayEndpoint(url, FakeRay.token)) as ray:
        made = World(home, ray, database_url)
        try:
            yield made
        finally:
            await made.reconciler.close()
            made.database.close()


async def _one_tick(home: Path, url: str) -> None:
    """A whole one: it waits for Ray and for what it began, however long that takes."""
    for part in (ray_poller, execute):
        vars(part)["PATIENCE_S"] = 60.0
    async with world(home, url) as made:
        await made.reconciler.tick()


async def _replica(home: Path, url: str, database_url: str) -> None:
    """Reconcile until this process is ended."""
    async with world(home, url, database_url) as made:
        await made.reconciler.run(asyncio.Event())


if __name__ == "__main__":
    if len(sys.argv) == 3:
        asyncio.run(_one_tick(Path(sys.argv[1]), sys.argv[2]))
    else:
        asyncio.run(_replica(Path(sys.argv[1]), *sys.argv[2:4]))
