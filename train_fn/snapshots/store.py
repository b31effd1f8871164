"""Snapshots: states that ranks keep on their node, outside their processes, for the next attempt to
continue from.

A survivor leaves one when an attempt breaks under it. Of a group that a single node holds, where
nobody may survive, rank 0 publishes them while it trains (``whole.py``). A snapshot is one file
in shared memory, published by a rename, with a label beside it. If shared memory is too small, a
survivor leaves the file on the node's disk. It counts as long as no later attempt began without it.
The end of the run removes it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from storage.errors import StorageError
from storage.run_control import Distrust
from storage.run_dir import RunDir
from train_fn.context import WorkerContext
from train_fn.errors import PeerApart, RanksApart, StateNotWhole
from train_fn.node.node_dir import (
    own_temporary_dir,
    shared_memory_root,
    snapshots_dir,
    states_on_disk,
)
from train_fn.snapshots.state_file import (
    exclusively,
    is_in_use,
    open_state,
    read_state,
    write_all,
    write_state,
)
from train_fn.state.pieces import WHOLE, Piece

KEPT_FREE = 0.1
"""Fraction of shared memory, and of the disk, that snapshots leave free."""

logger = logging.getLogger(__name__)

Origin = tuple[int, int]
"""Submission and attempt: later ones compare as greater."""


@dataclass(frozen=True)
class Label:
    """Describes a state that a rank left. ``problem`` says why it left none."""

    submission: int
    attempt: int
    step: int
    rank: int
    digest: str | None
    problem: str | None
    storage: str = ""
    """URI of the storage that holds the run's directory, for a later process that checks whether
    the state still counts."""
    pieces: int = 1
    """Pieces that make up the state. If there are several, this is the one of number ``rank``; if
    there are more ranks than pieces, of its remainder."""
    on_disk: bool = False
    """Whether the state is on the node's disk, since shared memory was too small."""

    @property
    def origin(self) -> Origin:
        return self.submission, self.attempt

    @property
    def piece(self) -> Piece:
        """Return which piece of the state it is."""
        return WHOLE if self.pieces == 1 else Piece(self.rank % self.pieces, self.pieces)


@dataclass(frozen=True)
class SnapshotStore:
    """The snapshots of one run on one node. Several nodes may share a machine, so that each has its
    own directory."""

    directory: Path
    submission: int

    def write(self, label: Label, state: dict[str, Any]) -> Label:
        """Publish ``state``, then its label, and return that. A label without a digest gets that of
        the state.

        Raises what ``write_state`` does, and StateNotWhole if the state does not have
        the digest of its label: it has changed since, and nothing is published.
        """
        with self._published_state(label) as draft:
            written = write_state(draft, state)
            if label.digest not in (None, written):
                raise StateNotWhole(label.step, "it has changed while a snapshot was written")
        label = replace(label, digest=written)
        self._write_label_or_remove(label)
        return label

    def take_in(self, label: Label, blocks: Iterable[bytes | memoryview]) -> None:
        """Publish the file of a state that comes from another node, then its label. Raises OSError,
        and ValueError if the state does not match its label."""
        label = replace(label, on_disk=False)
        with self._published_state(label) as draft:
            with exclusively(draft) as file:
                for block in blocks:
                    write_all(file, block)
                file.truncate()
            _require_state_of(label, *read_state(draft))
        self._write_label_or_remove(label)

    def open(self, label: Label) -> BinaryIO:
        """Return the file of a label's state. Raises OSError."""
        return open_state(self._state_path(label))

    def _write_label_or_remove(self, label: Label) -> None:
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
        """Return the state of a label, on the CPU. Its tensors are views of the file, which may be
        removed meanwhile. Raises OSError, and ValueError if the state does not match its label."""
        state, found = read_state(self._state_path(label))
        _require_state_of(label, state, found)
        return state

    def remove_older(self, newest: Label, *, keep: int) -> None:
        """Remove what is older than ``newest``, except for the ``keep`` newest of those states. Of
        a sharded model, a state is all pieces of it that are here."""
        older = self._older(newest)
        states = dict.fromkeys((each.origin, each.step) for each in older if not each.problem)
        kept = list(states)[-keep:] if keep else []
        for label in older:
            if label.problem or (label.origin, label.step) not in kept:
                self.remove(label)

    def _older(self, newest: Label) -> list[Label]:
        """Return the labels that are older than ``newest``, by age."""
        moments = [((label.origin, label.step), label) for label in self.labels()]
        older = [each for each in moments if each[0] < (newest.origin, newest.step)]
        return [label for _, label in sorted(older, key=lambda each: each[0])]

    def recycle_older(self, newest: Label, but: Label | None = None) -> None:
        """Remove what is older than ``newest``, but keep all ranks' states of ``but``. Keep one
        file of each rank as well: its next state is written over it, since fresh memory is slow. A
        file that somebody reads stays as it is."""
        for label in self._older(newest):
            if but is not None and (label.origin, label.step) == (but.origin, but.step):
                continue
            if label.on_disk:
                self.remove(label)
                continue
            self._label_path(label).unlink(missing_ok=True)
            with suppress(OSError):  # it has no state, or another rank was faster
                self._state_path(label).replace(self._spare_path(label))

    def spare_bytes(self, label: Label) -> int:
        """Return the size of the file over which a state will be written, or 0."""
        with suppress(OSError):
            return self._spare_path(label).stat().st_size
        return 0

    def drop_spares(self) -> None:
        """Remove the files over which states of an earlier attempt would have been written."""
        for path in self.directory.glob("s*-spare-*.tmp"):
            path.unlink(missing_ok=True)

    @contextmanager
    def _published_state(self, label: Label) -> Iterator[Path]:
        """Yield the path of a draft that becomes a label's state (``_published``)."""
        path = self._state_path(label)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(OSError):  # there is none
            self._spare_path(label).rename(_draft_of(path))
        with _published(path) as draft:
            yield draft

    def _spare_path(self, label: Label) -> Path:
        return self.directory / f"s{label.submission:03d}-spare-r{label.rank}.tmp"

    def drop_draft(self, label: Label) -> None:
        """Remove the file that a state was about to be written over."""
        _draft_of(self._state_path(label)).unlink(missing_ok=True)

    def make_room(self, newest: Label) -> int:
        """Remove what is older than ``newest``, except for one state, before it is written: over
        the file of a removed one, if nobody reads that. Return the size of this file, or 0."""
        draft = _draft_of(self._state_path(newest))
        older = [label for label in self._older(newest) if not label.problem]
        for label in older[:-1]:
            path = self._state_path(label)
            if not label.on_disk and not draft.exists() and not is_in_use(path):
                self._label_path(label).unlink(missing_ok=True)
                with suppress(OSError):  # another rank was faster
                    path.rename(draft)
        self.remove_older(newest, keep=1)
        return draft.stat().st_size if draft.exists() else 0

    def remove_after(self, step: int) -> None:
        """Remove states beyond ``step``, which the ranks agreed on: they were rejected.

        Also remove files without a label, from a process that died while it published.
        """
        for path in (*self.directory.glob("s*-*"), *self._on_disk().glob("s*-*")):
            label_path = self.directory / path.with_suffix(".json").name
            if (path.suffix == ".tmp" and not is_in_use(path)) or (
                path.suffix == ".pt" and not label_path.is_file()
            ):
                path.unlink(missing_ok=True)
        for label in self.labels():
            if label.step > step or label.problem:
                self.remove(label)

    def remove_all(self) -> None:
        """Remove the run's snapshots from this machine when the run ends, also those of other nodes
        on it.

        Snapshots of newer submissions, and of a run with this name in another storage, stay.
        """
        for of_run in (self.directory.parent, self._on_disk().parent):
            with suppress(OSError):  # another rank was faster, here and below
                for directory in of_run.iterdir():
                    with suppress(OSError):
                        if _place_of(directory) == _place_of(self.directory):
                            self._remove_own(directory)
                of_run.rmdir()

    def _remove_own(self, directory: Path) -> None:
        """Remove what this submission and older ones left in a node's directory, and the directory
        where nothing else is in it."""
        for path in directory.glob("s*-*"):
            if int(path.name[1:].partition("-")[0]) <= self.submission:
                path.unlink(missing_ok=True)
        directory.rmdir()

    def size_bytes(self) -> int:
        """Return what this submission's states, and those of older ones, take of the node's shared
        memory."""
        return sum(
            self._state_path(label).stat().st_size
            for label in self.labels()
            if not (label.problem or label.on_disk)
        )

    def free_bytes(self) -> int:
        """Return how much of the node's shared memory snapshots may still take."""
        return _free_bytes(shared_memory_root())

    def free_on_disk(self) -> int:
        """Return how much of the node's temporary disk snapshots may still take."""
        return _free_bytes(own_temporary_dir())

    def remove(self, label: Label) -> None:
        """Remove a state and its label."""
        self._label_path(label).unlink(missing_ok=True)
        self._state_path(label).unlink(missing_ok=True)

    def _label_path(self, label: Label) -> Path:
        return (self.directory / _file_name(label)).with_suffix(".json")

    def _state_path(self, label: Label) -> Path:
        return _state_path(self.directory, label)

    def _on_disk(self) -> Path:
        return _on_disk(self.directory)


def _require_state_of(label: Label, state: Mapping[str, Any], digest: str) -> None:
    """Raise ValueError if a state is not that of its label."""
    of_piece = tuple(state["piece"]) if state.get("piece") else WHOLE
    if (state["step"], digest, of_piece) != (label.step, label.digest, label.piece):
        raise ValueError(
            f"the snapshot of step {label.step} by rank {label.rank} does not have the digest "
            "of its label"
        )


@contextmanager
def _published(path: Path) -> Iterator[Path]:
    """Yield the path of a draft. It becomes ``path``, or is deleted if writing it fails."""
    draft = _draft_of(path)
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _free_bytes(root: Path) -> int:
    usage = shutil.disk_usage(root)
    return int(usage.free - usage.total * KEPT_FREE)


def _draft_of(path: Path) -> Path:
    return path.with_suffix(".tmp")


def labels_in(directory: Path) -> list[Label]:
    """Return the labels in a node's directory whose state is there or says why not."""
    found = []
    for path in sorted(directory.glob("*.json")) if directory.is_dir() else []:
        with suppress(OSError, ValueError, TypeError):
            label = Label(**json.loads(path.read_text()))
            if label.problem or _state_path(directory, label).is_file():
                found.append(label)
    return found


def _state_path(directory: Path, label: Label) -> Path:
    """Return where the state of a label in a node's directory is."""
    return (_on_disk(directory) if label.on_disk else directory) / _file_name(label)


def _on_disk(directory: Path) -> Path:
    """Return where the states are that are too large for a node's directory in shared memory."""
    return states_on_disk(directory.parent.name) / directory.name


def _file_name(label: Label) -> str:
    return f"s{label.submission:03d}-a{label.attempt:03d}-{label.step:09d}-r{label.rank}.pt"


def label_of(ctx: WorkerContext, step: int, pieces: int = 1) -> Label:
    """Return the label of this rank's state after ``step``, without a digest."""
    uri = ctx.run_dir.storage.uri
    return Label(ctx.submission, ctx.attempt, step, ctx.world_rank, None, None, uri, pieces)


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


def raise_apart(
    ctx: WorkerContext, step: int, trusted_step: int, odd: Sequence[int], what: str
) -> NoReturn:
    """Let no attempt begin from a state after ``trusted_step``, of this attempt or an older one.
    Then raise RanksApart on the ranks ``odd``, and PeerApart on the others; RanksApart on all if
    there are none.

    Args:
        step: steps done.
        what: what differs, in words.
    """
    snapshot_store(ctx).remove_after(trusted_step)
    try:
        ctx.run_dir.distrust(Distrust(ctx.submission, ctx.attempt, trusted_step))
    except StorageError as exc:
        logger.error(
            "it could not be written that states after step %d are not to be trusted: %s. Another "
            "rank may have written it; else a checkpoint after that step may be wrong",
            trusted_step,
            exc,
        )
    error = RanksApart(step, odd, what, trusted_step)
    if odd and ctx.world_rank not in odd:
        raise PeerApart(str(error), trusted_step)
    raise error
