"""A database as it is after a year of a team: tens of thousands of runs with their histories,
written in bulk."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import insert, text

from everstep.spec.run_spec import RunSpec
from everstep.wire import RunStatus
from service.db.engine import Database
from service.db.ids import new_id
from service.db.runs import new_row
from service.db.tables import events, projects, run_tags, runs, transitions
from service.model.run_rows import RunRow
from service.projections.goodput import TimeLedger

PROJECTS: Final = tuple(f"project-{index}" for index in range(20))
TEAMS: Final = ("vision", "speech", "text", "robots")
SPEC: Final[dict[str, Any]] = {
    "name": "digits",
    "task": {
        "name": "image_classification",
        "model": {"name": "mini_resnet"},
        "data": {"name": "digits"},
    },
    "scaling": {"min_workers": 1, "max_workers": 4},
    "checkpoint": {"every_steps": 50, "best_metric": "val_accuracy"},
}
_LIFE: Final = (RunStatus.QUEUED, RunStatus.STARTING, RunStatus.RUNNING)
_ENDS: Final = (RunStatus.SUCCEEDED,) * 8 + (RunStatus.FAILED, RunStatus.CANCELLED)
_CHUNK: Final = 2000


@dataclass(frozen=True)
class Seeded:
    """What a client may ask for."""

    ids: tuple[str, ...]
    created_at: tuple[float, ...]


def seed(database: Database, num_runs: int) -> Seeded:
    """Write ``num_runs`` ended runs of the last year, a few of them paused, and tell the database
    to look at its tables."""
    chance, now = random.Random(1), time.time()
    moments = sorted(now - chance.random() * 365 * 86_400 for _ in range(num_runs))
    spec = RunSpec.model_validate(SPEC)
    made = [_run(chance, spec, at) for at in moments]
    with database.write() as connection:
        connection.execute(
            insert(projects), [{"name": name, "created_at": moments[0]} for name in PROJECTS]
        )
    for start in range(0, num_runs, _CHUNK):
        _insert(database, made[start : start + _CHUNK])
    with database.write() as connection:
        connection.execute(text("ANALYZE"))
    return Seeded(tuple(run.id for run in made), tuple(run.created_at for run in made))


def _run(chance: random.Random, spec: RunSpec, at: float) -> RunRow:
    name, project = f"digits-{chance.randrange(2000)}", chance.choice(PROJECTS)
    tags = {"team": chance.choice(TEAMS), "sweep": str(chance.randrange(500))}
    spec = spec.model_copy(update={"name": name, "project": project, "tags": tags})
    end = RunStatus.PAUSED if chance.random() < 0.002 else chance.choice(_ENDS)
    ledger = TimeLedger.begin(at)
    return replace(
        new_row(new_id("run", at), spec, "tok_seed", at),
        status=end,
        submission=1,
        attempt=1,
        step=300,
        total_steps=300,
        epoch=4,
        metrics={"loss": 0.1, "lr": 0.001, "val_loss": 0.2, "val_accuracy": 0.97},
        latest_checkpoint=_checkpoint(300, at),
        recent_checkpoints=[_checkpoint(step, at) for step in (200, 250, 300)],
        started_at=at + 2,
        finished_at=at + 60 if end.terminal else None,
        time_ledger=ledger.dump(),
        last_seq=4,
        row_version=9,
    )


def _checkpoint(step: int, at: float) -> dict[str, Any]:
    return {
        "step": step,
        "submission": 1,
        "name": f"step-{step:09d}.s001.a001",
        "committed_at": at + 50,
        "size_bytes": 10**6,
    }


def _insert(database: Database, made: Sequence[RunRow]) -> None:
    passed, status_events = [], []
    for run in made:
        for seq, (before, after) in enumerate(
            zip((None, *_LIFE), (*_LIFE, run.status), strict=True), start=1
        ):
            at = run.created_at + seq
            passed.append(
                {"run_id": run.id, "seq": seq, "from_status": before, "to_status": after, "at": at}
                | {"reason_code": None, "reason_message": None}
            )
            data = {"from": before, "to": after, "reason": None}
            status_events.append(
                {
                    "run_id": run.id,
                    "seq": seq,
                    "at": at,
                    "kind": "status",
                    "submission": 1,
                    "attempt": 1,
                    "data": data,
                }
            )
    with database.write() as connection:
        connection.execute(
            insert(runs), [run.columns() | {"status": run.status.value} for run in made]
        )
        labels = [
            {"run_id": run.id, "key": key, "value": value}
            for run in made
            for key, value in run.tags.items()
        ]
        connection.execute(insert(run_tags), labels)
        connection.execute(insert(transitions), passed)
        connection.execute(insert(events), status_events)
