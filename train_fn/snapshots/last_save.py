"""The last save of a run that ends without a checkpoint of its newest step: a snapshot on a node
becomes that checkpoint.

It needs no rank and runs no code of the user: a snapshot holds everything that a checkpoint does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.spec.run_spec import RunSpec
from storage.checkpoints.journal_records import attempt_starts
from storage.checkpoints.manifest import Manifest
from storage.checkpoints.store import CheckpointStore
from storage.errors import CheckpointExists
from storage.run_dir import RunDir
from train_fn.checkpoints.files import manifest_facts, write_files
from train_fn.snapshots.election import Offer, elect, in_lineage, trusted
from train_fn.snapshots.store import Label, SnapshotStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LastSave:
    """The outcome. ``manifest`` is None if the state of ``step`` could not be saved, because of
    ``problem``."""

    step: int
    manifest: Manifest | None = None
    problem: str | None = None

    @property
    def summary(self) -> str:
        """The outcome in words, as the end of a sentence."""
        if self.manifest is not None:
            return f"step {self.step} is kept as checkpoint {self.manifest.name}"
        return f"step {self.step} could not be kept: {self.problem}"


@dataclass(frozen=True)
class Unreadable:
    """A snapshot that does not match its label."""

    problem: str


Commit = Callable[[Offer], Manifest | Unreadable]


def save_last(
    run_dir: RunDir, submission: int, offers: Sequence[Offer], commit: Commit
) -> LastSave | None:
    """Commit the state that the next attempt would continue from. Return None if a checkpoint is as
    new, or nothing was trained yet.

    If a snapshot cannot be read, the next one is tried. Raises nothing.
    """
    unreadable: LastSave | None = None
    step = max((offer.label.step for offer in offers), default=0)
    try:
        left, _ = trusted(offers, run_dir.distrusted())
        starts, durable = attempt_starts(run_dir), newest_durable(run_dir)
        while (
            offer := elect(in_lineage(left, starts)[0], submission).offer
        ) is not None and offer.label.step > durable:
            step, found = offer.label.step, commit(offer)
            if isinstance(found, Manifest):
                return LastSave(step, found)
            logger.warning("the last save of step %d: %s", step, found.problem)
            unreadable = unreadable or LastSave(step, problem=found.problem)
            left.remove(offer)
        return unreadable
    except Exception as exc:
        logger.warning("the last save of step %d failed", step, exc_info=exc)
        return LastSave(step, problem=f"{type(exc).__name__}: {exc}")


def save_own(
    run_dir: RunDir, spec: RunSpec, store: SnapshotStore, world_size: int
) -> LastSave | None:
    """Like ``save_last``, for states of this process's node only: for ranks without a driver."""
    offers = [Offer(0, label) for label in store.labels()]
    return save_last(
        run_dir,
        store.submission,
        offers,
        lambda offer: commit_snapshot(run_dir, spec, store, offer.label, world_size),
    )


def newest_durable(run_dir: RunDir) -> int:
    """Return the step of the newest checkpoint; 0 for none. Raises StorageError."""
    lineage = CheckpointStore(run_dir).lineage()
    return lineage[-1].step if lineage else 0


def commit_snapshot(
    run_dir: RunDir, spec: RunSpec, store: SnapshotStore, label: Label, world_size: int
) -> Manifest | Unreadable:
    """Commit a snapshot of this node as a checkpoint of the store's submission. Raises
    StorageError."""
    try:
        state = store.read(label)
    except Exception as exc:
        return Unreadable(f"the snapshot cannot be read: {exc}")
    return commit_state(run_dir, spec, store.submission, label.attempt, world_size, state)


def commit_state(
    run_dir: RunDir,
    spec: RunSpec,
    submission: int,
    attempt: int,
    world_size: int,
    state: dict[str, Any],
) -> Manifest:
    """Commit a whole state on the CPU as a checkpoint. If its attempt has committed one meanwhile,
    return that. Raises StorageError."""
    checkpoints = CheckpointStore(run_dir)
    try:
        with checkpoints.begin(state["step"], submission, attempt) as writer:
            write_files(writer, state, safetensors=spec.checkpoint.safetensors)
            return writer.commit(world_size=world_size, **manifest_facts(state))
    except CheckpointExists as exc:
        return checkpoints.manifest(exc.name)
