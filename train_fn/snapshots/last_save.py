"""The last save of a run that ends without a checkpoint of its newest step: a snapshot on a node
becomes that checkpoint.

It needs no rank and runs no code of the user: a snapshot holds everything that a checkpoint does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from everstep.spec.run_spec import RunSpec
from storage.checkpoints.manifest import FileEntry, Manifest
from storage.checkpoints.retention import attempt_starts
from storage.checkpoints.store import CheckpointStore
from storage.checkpoints.writer import write_beside
from storage.errors import CheckpointExists
from storage.run_dir import RunDir
from train_fn.checkpoints.commit import files_of, manifest_facts
from train_fn.snapshots.election import (
    Candidate,
    Elected,
    elect,
    in_lineage,
    snapshot_name,
    trusted,
)
from train_fn.snapshots.store import SnapshotStore

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
    candidate: Candidate


Write = Callable[[Candidate, str], "WrittenPiece | Unreadable"]
"""Writes a piece to the directory of a checkpoint, on the node where the piece is."""


def save_last(
    run_dir: RunDir, submission: int, candidates: Sequence[Candidate], world_size: int, write: Write
) -> LastSave | None:
    """Commit the state that the next attempt would continue from. Return None if a checkpoint is as
    new, or nothing was trained yet.

    If a snapshot cannot be read, the next one is tried. Raises nothing.
    """
    unreadable: LastSave | None = None
    step = max((candidate.label.step for candidate in candidates), default=0)
    try:
        left, _ = trusted(candidates, run_dir.distrusted())
        starts, durable = attempt_starts(run_dir), newest_durable(run_dir)
        while True:
            elected = elect(in_lineage(left, starts)[0], submission)
            if elected.candidate is None or elected.candidate.label.step <= durable:
                return unreadable
            step = elected.candidate.label.step
            found = _commit(run_dir, submission, elected, world_size, write)
            if isinstance(found, Manifest):
                return LastSave(step, found)
            logger.warning("the last save of step %d: %s", step, found.problem)
            unreadable = unreadable or LastSave(step, problem=found.problem)
            left.remove(found.candidate)
    except Exception as exc:
        logger.warning("the last save of step %d failed", step, exc_info=exc)
        return LastSave(step, problem=f"{type(exc).__name__}: {exc}")


def save_own(
    run_dir: RunDir, spec: RunSpec, store: SnapshotStore, world_size: int
) -> LastSave | None:
    """Like ``save_last``, for states of this process's node only: for ranks without a driver."""
    candidates = [Candidate(0, label) for label in store.labels()]
    write = partial(write_piece, run_dir, spec, store)
    return save_last(run_dir, store.submission, candidates, world_size, write)


def newest_durable(run_dir: RunDir) -> int:
    """Return the step of the newest checkpoint; 0 for none. Raises StorageError."""
    lineage = CheckpointStore(run_dir).lineage()
    return lineage[-1].step if lineage else 0


def _commit(
    run_dir: RunDir, submission: int, elected: Elected, world_size: int, write: Write
) -> Manifest | Unreadable:
    """Commit an elected state as a checkpoint of a submission. Raises StorageError."""
    assert elected.candidate is not None
    label = elected.candidate.label
    pieces = {candidate.label.piece.number: candidate for candidate in reversed(elected.candidates)}
    checkpoints, facts = CheckpointStore(run_dir), dict[str, Any]()
    try:
        with checkpoints.begin(label.step, submission, label.attempt) as writer:
            for number in sorted(pieces):
                written = write(pieces[number], writer.directory)
                if isinstance(written, Unreadable):
                    return written
                facts.update(written.facts)
                for name, entry in written.entries.items():
                    writer.adopt(name, entry)
            return writer.commit(
                world_size=world_size if label.pieces == 1 else label.pieces, **facts
            )
    except CheckpointExists as exc:
        return checkpoints.manifest(exc.name)


@dataclass(frozen=True)
class WrittenPiece:
    """What the node of a piece has written to a checkpoint's directory."""

    entries: Mapping[str, FileEntry]
    facts: Mapping[str, Any]
    """Those of the manifest, from the first piece."""


def write_piece(
    run_dir: RunDir, spec: RunSpec, store: SnapshotStore, candidate: Candidate, directory: str
) -> WrittenPiece | Unreadable:
    """Write a piece on this node to the directory of a checkpoint that was begun. The piece may be
    all of a state. The first one also writes what all have in common. Raises StorageError."""
    try:
        state = store.read(candidate.label)
    except Exception as exc:
        return Unreadable(f"{snapshot_name(candidate.label)} cannot be read: {exc}", candidate)
    is_first = candidate.label.piece.number == 0
    files = files_of(state, safetensors=spec.checkpoint.safetensors, with_common=is_first)
    entries = {name: write_beside(run_dir, directory, name, write) for name, write in files.items()}
    return WrittenPiece(entries, manifest_facts(state) if is_first else {})
