"""Snapshots: states that ranks keep on their node, outside their processes, for the next attempt to
continue from.

A survivor leaves one when an attempt breaks under it. Of a group that a single node holds, where
nobody may survive, rank 0 publishes them while it trains (``publisher.py``). A snapshot is one file
in shared memory, published by a rename, with a label beside it. It counts as long as no later
attempt began without it. The end of the run removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from storage.run_dir import RunDir
from train_fn.checkpoints.torch_file import without_checksums
from train_fn.context import WorkerContext
from train_fn.node.node_dir import shared_memory_root, snapshots_dir
from train_fn.state.digest import digest
from train_fn.state.tensor_tree import size_bytes

OVERHEAD_BYTES = 4 << 20
"""Room for everything but tensors."""
KEPT_FREE = 0.1
"""Fraction of shared memory that snapshots leave free."""
TURN_S = 2.0
"""How long a rank at least waits for the others of its node to leave their states,"""
_SLOWEST_BYTES_PER_S = 500e6
"""and how fast it expects that of memory."""
_TURN_POLL_S = 0.002

Origin = tuple[int, int]
"""Submission and attempt: later ones compare as greater."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Label:
    """Describes a state that a rank left. ``problem`` says why it left none."""

    submission: int
    attempt: int
    step: int
    rank: int
    digest: str | None
    problem: str | None
    storage: str | None = None
    """URI of the storage that holds the run's directory, for a later process that checks whether
    the state still counts."""

    @property
    def origin(self) -> Origin:
        return self.submission, self.attempt


@dataclass(frozen=True)
class SnapshotStore:
    """The snapshots of one run on one node. Several nodes may share a machine, so that each has its
    own directory."""

    directory: Path
    submission: int

    def write(self, label: Label, state: dict[str, Any]) -> None:
        """Publish ``state``, then its label. Raises OSError, or RuntimeError if torch cannot write
        it."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # the label's digest is what a reader compares
        with _published(self._state_path(label)) as draft, without_checksums():
            torch.save(state, draft)
        try:
            self.write_label(label)
        except BaseException:  # without its label nobody finds the state, which fills the memory
            self._state_path(label).unlink(missing_ok=True)
            raise

    def write_label(self, label: Label) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _published(self._label_path(label)) as draft:
            draft.write_text(json.dumps(asdict(label)))

    def labels(self) -> list[Label]:
        """Return the labels on this node of this submission and older ones, whose state exists or
        that say why it does not."""
        return [label for label in labels_in(self.directory) if label.submission <= self.submission]

    def read(self, label: Label) -> dict[str, Any]:
        """Return the state of a label, on the CPU. Raises OSError, and ValueError if the state does
        not match its label."""
        state: dict[str, Any] = torch.load(
            self._state_path(label), map_location="cpu", weights_only=True
        )
        if state["step"] != label.step or digest(state) != label.digest:
            raise ValueError(
                f"the snapshot of step {label.step} by rank {label.rank} does not have the digest "
                "of its label"
            )
        return state

    def remove_older(self, newest: Label, *, keep: int) -> None:
        """Remove what is older than ``newest``, except for the ``keep`` newest of those states."""
        older = [
            label
            for label in self.labels()
            if (label.origin, label.step) < (newest.origin, newest.step)
        ]
        states = sorted(
            (label for label in older if not label.problem),
            key=lambda label: (label.origin, label.step),
        )
        kept = states[-keep:] if keep else []
        for label in older:
            if label not in kept:
                self._remove(label)

    def remove_after(self, step: int) -> None:
        """Remove states beyond ``step``, which the ranks agreed on: they were rejected.

        Also remove files without a label, from a process that died while it published.
        """
        for path in self.directory.glob("s*-*"):
            if path.suffix == ".tmp" or (
                path.suffix == ".pt" and not path.with_suffix(".json").is_file()
            ):
                path.unlink(missing_ok=True)
        for label in self.labels():
            if label.step > step or label.problem:
                self._remove(label)

    def remove_all(self) -> None:
        """Remove the run's snapshots from this machine when the run ends, also those of other nodes
        on it.

        Snapshots of newer submissions, and of a run with this name in another storage, stay.
        """
        with suppress(OSError):  # another rank was faster, here and below
            for directory in self.directory.parent.iterdir():
                with suppress(OSError):
                    if _place_of(directory) == _place_of(self.directory):
                        self._remove_own(directory)
            self.directory.parent.rmdir()

    def _remove_own(self, directory: Path) -> None:
        """Remove what this submission and older ones left in a node's directory, and the directory
        where nothing else is in it."""
        for path in directory.glob("s*-*"):
            if int(path.name[1:].partition("-")[0]) <= self.submission:
                path.unlink(missing_ok=True)
        directory.rmdir()

    def size_bytes(self) -> int:
        """Return what this submission's states, and those of older ones, take on this node."""
        return sum(
            self._state_path(label).stat().st_size for label in self.labels() if not label.problem
        )

    def free_bytes(self) -> int:
        """Return how much of the node's shared memory snapshots may still take."""
        usage = shutil.disk_usage(shared_memory_root())
        return int(usage.free - usage.total * KEPT_FREE)

    def _remove(self, label: Label) -> None:
        self._label_path(label).unlink(missing_ok=True)
        self._state_path(label).unlink(missing_ok=True)

    def _label_path(self, label: Label) -> Path:
        return self._state_path(label).with_suffix(".json")

    def _state_path(self, label: Label) -> Path:
        return self.directory / _file_name(label)


@contextmanager
def _published(path: Path) -> Iterator[Path]:
    """Yield the path of a draft. It becomes ``path``, or is deleted if writing it fails."""
    draft = path.with_suffix(".tmp")
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def labels_in(directory: Path) -> list[Label]:
    """Return the labels in a node's directory whose state is there or says why not."""
    found = []
    for path in sorted(directory.glob("*.json")) if directory.is_dir() else []:
        with suppress(OSError, ValueError, TypeError):
            label = Label(**json.loads(path.read_text()))
            if label.problem or (directory / _file_name(label)).is_file():
                found.append(label)
    return found


def _file_name(label: Label) -> str:
    return f"s{label.submission:03d}-a{label.attempt:03d}-{label.step:09d}-r{label.rank}.pt"


def snapshot_store(ctx: WorkerContext) -> SnapshotStore:
    """Return the store of this rank's node."""
    return node_snapshots(ctx.run_dir, ctx.node_id, ctx.submission)


def node_snapshots(run_dir: RunDir, node_id: str, submission: int) -> SnapshotStore:
    """Return a node's snapshots of this run directory. Another directory may hold a run of the same
    id."""
    place = hashlib.sha256(run_dir.uri.encode()).hexdigest()[:12]
    return SnapshotStore(snapshots_dir(run_dir.run_id) / f"{node_id}.{place}", submission)


def _place_of(directory: Path) -> str:
    """Return which run directory a node's snapshots belong to, as ``node_snapshots`` names it."""
    return directory.name.rpartition(".")[2]


def leave_snapshot(ctx: WorkerContext, state: dict[str, Any]) -> str | None:
    """Leave ``state`` on this node in place of all older ones, or a label that says why not. Return
    None, or the problem.

    Ranks of one node take turns, and a rank that finds the same state there writes no other: one of
    each rank may not fit.
    """
    store, label = snapshot_store(ctx), _label(ctx, state)
    with _in_turn(store, TURN_S + size_bytes(state) / _SLOWEST_BYTES_PER_S):
        # by another rank, or published
        problem = None if _is_there(store, label) else _leave_if_it_fits(store, label, state)
    if problem is None:
        store.remove_older(label, keep=0)
    else:
        logger.warning("step %d is not left on this node: %s", state["step"], problem)
        with suppress(OSError):
            store.write_label(replace(label, digest=None, problem=problem))
    return problem


def _leave_if_it_fits(store: SnapshotStore, label: Label, state: dict[str, Any]) -> str | None:
    """Write ``state``, and remove older ones first if only that makes room. Return None, or the
    problem."""
    problem = _write_if_it_fits(store, label, state)
    if problem is None or shortage(store, state, store.size_bytes()) is not None:
        return problem
    store.remove_older(label, keep=0)
    return _write_if_it_fits(store, label, state)


def _is_there(store: SnapshotStore, wanted: Label) -> bool:
    """Whether a rank has left exactly this state."""
    same = (wanted.origin, wanted.step, wanted.digest)
    return any(
        label.problem is None and (label.origin, label.step, label.digest) == same
        for label in store.labels()
    )


@contextmanager
def _in_turn(store: SnapshotStore, patience_s: float) -> Iterator[None]:
    """Let one rank of this node in at a time. After ``patience_s`` this rank enters anyway: the
    other one may be stopped."""
    try:
        store.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = os.open(store.directory, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the write will report the problem
        yield
        return
    gives_up_at = time.monotonic() + patience_s
    try:
        while not _locked(held) and time.monotonic() < gives_up_at:
            time.sleep(_TURN_POLL_S)
        yield
    finally:
        os.close(held)


def _locked(held: int) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def publish_snapshot(ctx: WorkerContext, state: dict[str, Any]) -> str | None:
    """Keep ``state`` on this node beside the newest one before it: while one is written, another is
    whole. Return None, or the problem."""
    return _write_if_it_fits(snapshot_store(ctx), _label(ctx, state), state)


def shortage(store: SnapshotStore, state: dict[str, Any], freed_bytes: int = 0) -> str | None:
    """Return why ``state`` does not fit into the node's shared memory after ``freed_bytes`` more
    are free; None if it fits."""
    needed, free = size_bytes(state) + OVERHEAD_BYTES, max(0, store.free_bytes() + freed_bytes)
    if needed <= free:
        return None
    return f"a snapshot of {needed} bytes does not fit the {free} bytes of shared memory left"


def _label(ctx: WorkerContext, state: dict[str, Any]) -> Label:
    return Label(
        ctx.submission,
        ctx.attempt,
        state["step"],
        ctx.world_rank,
        digest(state),
        None,
        ctx.run_dir.storage.uri,
    )


def _write_if_it_fits(store: SnapshotStore, label: Label, state: dict[str, Any]) -> str | None:
    """Make room, then write ``state``: a node never holds more than two states of a rank."""
    store.remove_older(label, keep=1)
    problem = shortage(store, state)
    if problem is None:
        try:
            store.write(label, state)
        except (OSError, RuntimeError) as exc:
            # torch has no class of its own for a file that it could not write
            problem = f"the snapshot could not be written: {exc}"
    return problem
