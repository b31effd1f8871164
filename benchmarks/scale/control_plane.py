"""What the service and a controller need for large runs, measured piece by piece on this machine.

    python -m benchmarks control_plane

Journals applied to SQLite, bytes of the database for each step, the event that lists a group's
workers, the choice of nodes, and the look whether nodes accept a connection. No Ray, no training.
"""

from __future__ import annotations

import resource
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import write
from everstep.spec.parsing import parse_spec
from everstep.wire.events import EventKind
from service.db.engine import Database
from service.db.events import EventStore
from service.db.runs import RunStore
from storage.logs.journal import JournalEvent
from train_fn.node.network import accepts_connection
from train_fn.recovery.sizing import NodeView, choose_nodes

STEPS, BATCH = 20_000, 25
"""A journal's metrics event holds what came within a quarter of a second."""
GPUS = (64, 1024, 16_384, 100_000)
PER_NODE = 8
SPEC = {
    "name": "scale",
    "task": {
        "name": "image_classification",
        "model": {"name": "mini_resnet"},
        "data": {"name": "digits"},
    },
}


class Applied:
    """A database with one run whose journal is applied to it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "everstep.db"
        self._database = Database(f"sqlite:///{self._path}")
        self._database.migrate()
        runs = RunStore(self._database)
        self._run_id = runs.create(parse_spec(SPEC), "benchmark")[0].id
        runs.claim_submission(self._run_id, 0)
        self._events = EventStore(self._database)
        self._n = 0

    def apply(self, *parts: tuple[EventKind, dict[str, Any]]) -> float:
        """Seconds that one transaction of these events takes."""
        events = [self._event(kind, data) for kind, data in parts]
        began = time.perf_counter()
        self._events.apply_journal(self._run_id, 1, events, f"cursor-{self._n}")
        return time.perf_counter() - began

    def size_bytes(self) -> int:
        return sum(
            path.stat().st_size
            for path in self._path.parent.iterdir()
            if path.name.startswith("everstep.db")
        )

    def close(self) -> None:
        self._database.close()

    def _event(self, kind: EventKind, data: dict[str, Any]) -> JournalEvent:
        self._n += 1
        return JournalEvent(
            kind=kind,
            at=time.time(),
            submission=1,
            attempt=1,
            data=data,
            source="driver",
            source_n=self._n,
            n=self._n,
        )


def workers(num_gpus: int) -> dict[str, Any]:
    """What an attempt's beginning says of its ranks."""
    places = [
        {
            "rank": rank,
            "node_id": f"{rank // PER_NODE:056x}",
            "node_ip": "10.100.100.100",
            "pid": 10_000 + rank % PER_NODE,
        }
        for rank in range(num_gpus)
    ]
    return {"world_size": num_gpus, "workers": places}


def applied_steps(directory: Path) -> dict[str, float]:
    """Steps of one run a second, and the database's growth."""
    applied = Applied(directory)
    applied.apply(
        (EventKind.ATTEMPT_STARTED, workers(2)),
        (EventKind.TRAINING_STARTED, {"total_steps": STEPS, "steps_per_epoch": 100}),
    )
    before, seconds = applied.size_bytes(), 0.0
    for first in range(1, STEPS + 1, BATCH):
        points = [
            {
                "step": step,
                "at": time.time(),
                "values": {"loss": 1 / step, "lr": 0.1, "grad_norm": 1.0, "samples_per_s": 900.0},
            }
            for step in range(first, first + BATCH)
        ]
        seconds += applied.apply((EventKind.METRICS, {"points": points}))
    grown = applied.size_bytes() - before
    applied.close()
    return {
        "events_per_s": STEPS / BATCH / seconds,
        "steps_per_s": STEPS / seconds,
        "bytes_per_step": grown / STEPS,
    }


def applied_workers(num_gpus: int) -> float:
    """Seconds to apply the beginning of an attempt of so many ranks."""
    with tempfile.TemporaryDirectory() as directory:
        applied = Applied(Path(directory))
        seconds = applied.apply((EventKind.ATTEMPT_STARTED, workers(num_gpus)))
        applied.close()
        return seconds


def chosen_nodes(num_gpus: int) -> float:
    """Seconds to choose nodes for a group of which one node is gone."""
    views = [
        NodeView(f"{node:056x}", "10.0.0.1", 1, {"GPU": PER_NODE}, {"GPU": 0.0}, reachable=node > 0)
        for node in range(num_gpus // PER_NODE + 1)
    ]
    held = {view.node_id: PER_NODE for view in views[:-1]}
    return timed(
        lambda: choose_nodes(
            views, held, {"GPU": 1}, num_workers=num_gpus - PER_NODE, strategy="PACK"
        )
    )


def asked_nodes(num_nodes: int) -> float:
    """Seconds to ask so many addresses for a connection; all are on this machine, so that the
    network costs nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
            address = listener.getsockname()[:2]
            return timed(lambda: accepts_connection([address] * num_nodes, 10.0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main(argv: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        steps = applied_steps(Path(directory))
    rows = []
    for num_gpus in GPUS:
        row = {
            "gpus": num_gpus,
            "attempt_started_s": applied_workers(num_gpus),
            "attempt_started_bytes": len(str(workers(num_gpus))),
            "choose_nodes_s": chosen_nodes(num_gpus),
            "ask_nodes_s": asked_nodes(num_gpus // PER_NODE),
        }
        rows.append({name: round(value, 5) for name, value in row.items()})
        print(rows[-1], flush=True)
    write(
        "control_plane",
        {"journal": {name: round(value, 1) for name, value in steps.items()}, "groups": rows},
    )
