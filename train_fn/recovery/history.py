"""What the run's journals say of its past: earlier failures for the budgets, and how many attempts
there were."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from everstep.wire import Failure
from everstep.wire.events import EventKind
from storage.logs.journal import read_journal
from storage.logs.journal_line import JournalEvent
from storage.run_dir import RunDir
from train_fn.recovery.progress import moved_at
from train_fn.recovery.verdict import PastFailure

READ_BATCH = 5000


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs."""

    rank: int
    node_id: str
    pid: int


@dataclass(frozen=True)
class History:
    """The past of a run, over all its submissions."""

    failures: tuple[PastFailure, ...] = ()
    last_attempt: int = 0
    last_step: int | None = None
    """Most steps done that any journal tells of."""
    total_steps: int | None = None
    """Steps of the whole run, once a rank has told."""
    world_size: int = 0
    """Ranks of the last attempt."""
    workers: tuple[RankPlace, ...] = ()
    """Those ranks."""
    nodes: frozenset[str] = frozenset()
    """Ids of all nodes that ever ran ranks: where their snapshots may lie."""
    attempt_open: bool = False
    """Whether the last attempt began and has not ended."""
    drills: frozenset[str] = frozenset()
    """Ids of drills that were begun or refused."""
    finished: bool = True
    """Whether the last submission came to its end; it did not where its driver was lost."""
    last_at: float | None = None
    """When the last event happened, in unix seconds."""
    damage: tuple[dict[str, Any], ...] = ()
    """Damage of journals that no driver has told yet, as data of ``journal_damaged`` events."""
    moved_at: float | None = None
    """When training was last seen to move, in unix seconds."""

    @property
    def steps_done(self) -> bool:
        """Whether every step was done at some time, though perhaps not kept."""
        return self.total_steps is not None and (self.last_step or 0) >= self.total_steps

    def with_event(self, event: JournalEvent) -> History:
        """The same with one event more."""
        changes: dict[str, Any] = {
            "last_attempt": max(self.last_attempt, event.attempt),
            "last_at": event.at,
        }
        moved = moved_at(event.kind, event.at, event.data)
        if moved is not None:
            changes["moved_at"] = max(self.moved_at or moved, moved)
        if event.kind is EventKind.SUBMISSION_STARTED:
            changes["finished"] = False
        elif event.kind is EventKind.FINISHED:
            changes["finished"] = True
        elif event.kind is EventKind.JOURNAL_DAMAGED:
            others = tuple(told for told in self.damage if told != event.data)
            changes["damage"] = (
                others if event.source.startswith("driver") else (*others, event.data)
            )
        elif event.kind is EventKind.FAILURE:
            changes["failures"] = (*self.failures, past_failure(Failure.of(event)))
        elif event.kind is EventKind.ATTEMPT_STARTED:
            workers = (
                RankPlace(place["rank"], place["node_id"], place["pid"])
                for place in event.data["workers"]
            )
            changes |= {
                "attempt_open": True,
                "world_size": event.data["world_size"],
                "workers": tuple(workers),
            }
            changes["nodes"] = self.nodes | {place["node_id"] for place in event.data["workers"]}
        elif event.kind is EventKind.ATTEMPT_ENDED:
            changes["attempt_open"] = False
        elif event.kind in (EventKind.DRILL_STARTED, EventKind.DRILL_FAILED):
            changes["drills"] = self.drills | {event.data["id"]}
        elif event.kind is EventKind.TRAINING_STARTED:
            changes["total_steps"] = event.data.get("total_steps")
        elif event.kind is EventKind.METRICS and event.data["points"]:
            changes["last_step"] = max(
                [self.last_step or 0, *(point["step"] for point in event.data["points"])]
            )
        return dataclasses.replace(self, **changes)


def past_failure(failure: Failure) -> PastFailure:
    """Return what later decisions need of a failure."""
    return PastFailure(failure.verdict, failure.step, failure.evidence.get("signature"))


def read_history(run_dir: RunDir) -> History:
    """The run's past from its journals, oldest submission first. Raises StorageError where they
    cannot be read.

    Lines that are damaged cost an event each and nothing behind them. Nobody may write any of these
    journals meanwhile.
    """
    history = History()
    for submission in run_dir.submissions():
        cursor: str | None = None
        while True:
            events, cursor = read_journal(
                run_dir, submission, cursor, READ_BATCH, past_damage=True, is_over=True
            )
            for event in events:
                history = history.with_event(event)
            if not events:
                break
    return history
