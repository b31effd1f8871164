"""Read a run's past from its journals: earlier failures, attempts, and where its ranks ran."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from everstep.wire import Failure
from everstep.wire.events import EventKind
from storage.logs.journal import JournalEvent, journal_events
from storage.run_dir import RunDir
from train_fn.recovery.decision import MICRO_BATCH_SIZE, PastFailure
from train_fn.recovery.hang import moved_at
from train_fn.recovery.links import from_json


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs."""

    rank: int
    node_id: str
    pid: int


@dataclass(frozen=True)
class History:
    """A run's past, over all its submissions."""

    failures: tuple[PastFailure, ...] = ()
    last_attempt: int = 0
    last_step: int | None = None
    """Most steps done, as far as any journal knows."""
    total_steps: int | None = None
    """Steps of the whole run, once a rank has reported them."""
    world_size: int = 0
    """Ranks of the last attempt."""
    workers: tuple[RankPlace, ...] = ()
    """Those ranks."""
    nodes: frozenset[str] = frozenset()
    """Ids of all nodes that ever ran ranks: their snapshots may be there."""
    attempt_open: bool = False
    """Whether the last attempt has not ended."""
    drills: frozenset[str] = frozenset()
    """Ids of drills that were started or refused."""
    finished: bool = True
    """Whether the last submission ended in order; False if its driver was lost."""
    succeeded: bool = False
    """Whether a submission made all steps."""
    last_at: float | None = None
    """Time of the last event, in unix seconds."""
    damage: tuple[dict[str, Any], ...] = ()
    """Damage of journals that no driver has reported yet, as data of ``journal_damaged`` events."""
    moved_at: float | None = None
    """When training last made progress, in unix seconds."""

    @property
    def steps_done(self) -> bool:
        """Return whether every step was done once, though perhaps not saved."""
        return self.total_steps is not None and (self.last_step or 0) >= self.total_steps

    @property
    def finished_at(self) -> int | None:
        """Return the last step of a run that made all its steps; None if there are more to make."""
        is_longer = self.total_steps is not None and not self.steps_done
        return self.last_step or 0 if self.succeeded and not is_longer else None

    def with_event(self, event: JournalEvent) -> History:
        """Return the history with one more event."""
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
            changes["succeeded"] = self.succeeded or event.data["outcome"] == "succeeded"
        elif event.kind is EventKind.JOURNAL_DAMAGED:
            others = tuple(damage for damage in self.damage if damage != event.data)
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
            # A user's function begins each attempt without one.
            changes["total_steps"] = event.data.get("total_steps") or self.total_steps
        elif event.kind is EventKind.METRICS and event.data["points"]:
            changes["last_step"] = max(
                [self.last_step or 0, *(point["step"] for point in event.data["points"])]
            )
        return dataclasses.replace(self, **changes)


def past_failure(failure: Failure) -> PastFailure:
    """Return the part of a failure that later decisions need."""
    evidence = failure.evidence
    return PastFailure(
        failure.verdict,
        failure.step,
        evidence.get("signature"),
        failure.node_id,
        from_json(evidence.get("pairs")),
        evidence.get("worked_s"),
        evidence.get(MICRO_BATCH_SIZE),
    )


def read_history(run_dir: RunDir) -> History:
    """Return the run's past, from its journals, oldest submission first.

    A damaged line costs its own event only. No process may write these journals meanwhile. Raises
    StorageError if they cannot be read.
    """
    history = History()
    for event in journal_events(run_dir, is_over=True):
        history = history.with_event(event)
    return history
