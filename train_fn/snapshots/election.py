"""Choose the snapshot to resume from, among those that all ranks found. A pure function, so every
rank makes the same choice.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

from everstep.spec.run_spec import RunSpec
from everstep.wire import ReasonCode
from everstep.wire.events import EventKind
from storage.checkpoints.manifest import FileEntry, Manifest
from storage.checkpoints.reader import RestorePoint, voided_by
from storage.checkpoints.retention import attempt_starts
from storage.checkpoints.store import CheckpointStore
from storage.checkpoints.writer import write_beside
from storage.errors import CheckpointExists, StorageError
from storage.filesystem import open_storage
from storage.logs.journal import read_journal
from storage.run_control import Distrust, struck_by
from storage.run_dir import CheckpointName, RunDir
from train_fn.checkpoints.commit import manifest_facts, piece_contents, write_files
from train_fn.checkpoints.torch_file import save
from train_fn.context import WorkerContext
from train_fn.errors import PeerApart, RanksApart
from train_fn.node import node_dir
from train_fn.snapshots.store import Label, Origin, SnapshotStore, labels_in, snapshot_store


@dataclass(frozen=True)
class Offer:
    """Name a state and a rank that can read it."""

    rank: int
    label: Label


@dataclass(frozen=True)
class Rejection:
    """Describe a snapshot that is not used, and why."""

    name: str
    problem: str


@dataclass(frozen=True)
class Elected:
    """Hold the newest trusted snapshot (None if there is none), and the rejected ones."""

    offer: Offer | None
    rejected: tuple[Rejection, ...]
    offers: tuple[Offer, ...] = ()
    """All offers of the state: those of every piece of it, and equal ones of several ranks."""


def elect(offers: list[Offer], submission: int) -> Elected:
    """Elect the newest snapshot of this submission or an earlier one. Among equal ones, that of the
    lowest rank that can read it wins.

    If snapshots of the same step and attempt differ, none of them is trusted. At the same step, a
    later attempt's snapshots win over an earlier one's, since that attempt resumed from a state
    that the ranks had agreed on. Snapshots of a newer submission are ignored, since it has replaced
    this one. A state in pieces counts if every one of its pieces is somewhere; pieces of two
    attempts never mix.
    """
    rejected: list[Rejection] = []
    moments: dict[tuple[int, Origin], list[Offer]] = {}
    for offer in offers:
        if offer.label.submission > submission:
            continue
        if offer.label.problem:
            rejected.append(Rejection(snapshot_name(offer.label), offer.label.problem))
        else:
            moments.setdefault((offer.label.step, offer.label.origin), []).append(offer)
    for _, peers in sorted(moments.items(), key=itemgetter(0), reverse=True):
        digests: dict[int, set[str | None]] = {}
        for offer in peers:
            digests.setdefault(_compared(offer.label), set()).add(offer.label.digest)
        alike = [offer for offer in peers if len(digests[_compared(offer.label)]) == 1]
        if alike and are_whole([offer.label for offer in alike]):
            return Elected(
                min(alike, key=lambda offer: (offer.rank, offer.label.rank)),
                tuple(rejected),
                tuple(alike),
            )
        differing = (offer.label for offer in peers if len(digests[_compared(offer.label)]) > 1)
        rejected += [
            Rejection(
                snapshot_name(label),
                f"differs from the other snapshots of step {label.step}; digest {label.digest}",
            )
            for label in dict.fromkeys(differing)
        ]
    return Elected(None, tuple(rejected))


def _compared(label: Label) -> int:
    """Return what is the same for labels whose digests must be equal: those of a state that every
    rank holds whole, or the copies of one rank's piece."""
    return -1 if label.pieces == 1 else label.rank


def are_whole(labels: Sequence[Label]) -> bool:
    """Return whether these pieces of one state are all of it."""
    pieces = {label.piece for label in labels}
    return {piece.number for piece in pieces} == set(range(labels[0].pieces)) and len(
        {piece.of for piece in pieces}
    ) == 1


def in_lineage(
    offers: list[Offer], starts: Mapping[Origin, RestorePoint]
) -> tuple[list[Offer], tuple[Rejection, ...]]:
    """Return the offers that no later attempt voids, and rejections of the others.

    An attempt that could not reach a snapshot resumed from an older state, and the run continued
    from there. So the snapshot is void, even if its node comes back. The same holds for snapshots
    of a process that was evicted but still ran, in this submission or an older one.

    Args:
        starts: where each attempt started, by (submission, attempt).
    """
    standing, rejected = [], []
    for offer in offers:
        label = offer.label
        start = voided_by(CheckpointName(label.step, *label.origin), starts)
        if start is None:
            standing.append(offer)
        else:
            went_on = "began anew" if start.fresh else f"went on from step {start.step}"
            rejected.append(Rejection(snapshot_name(label), f"a later attempt {went_on}"))
    return standing, tuple(rejected)


def trusted(
    offers: Sequence[Offer], distrusted: Sequence[Distrust]
) -> tuple[list[Offer], tuple[Rejection, ...]]:
    """Return the offers that no entry covers, and rejections of the others."""
    standing: list[Offer] = []
    rejected: dict[str, Rejection] = {}
    for offer in offers:
        label = offer.label
        entry = struck_by(distrusted, label.origin, label.step)
        if entry is None:
            standing.append(offer)
        else:
            name = snapshot_name(label)
            rejected[name] = Rejection(name, entry.problem)
    return standing, tuple(rejected.values())


def snapshot_name(label: Label) -> str:
    """Return the name of a snapshot in events."""
    piece = f"{label.piece} of the " if label.pieces > 1 else ""
    return f"{piece}snapshot of step {label.step} by rank {label.rank} of attempt {label.attempt}"


# ---------------------------------------------------------------- apart

# Ranks that should hold the same hold something else: what they may have left is not used again.


def odd_ranks(of_ranks: Sequence[Hashable], of: int = 1) -> tuple[int, ...]:
    """Return the ranks that differ from most; none if there is no majority.

    Args:
        of: how many pieces of a state the ranks hold. Rank r has piece r % of, and is compared with
            those that have it, too.
    """
    found = []
    for number in range(of):
        alike = of_ranks[number::of]
        usual, count = Counter(alike).most_common(1)[0]
        if 2 * count > len(alike):
            found += [number + of * at for at, value in enumerate(alike) if value != usual]
    return tuple(sorted(found))


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


# ---------------------------------------------------------------- last save

# The last save of a run that ends without a checkpoint of its newest step: a snapshot on a node
# becomes that checkpoint.
#
# It needs no rank and runs no code of the user: a snapshot holds everything that a checkpoint does.

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
    offer: Offer


Commit = Callable[[Elected], Manifest | Unreadable]


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
        while True:
            elected = elect(in_lineage(left, starts)[0], submission)
            if elected.offer is None or elected.offer.label.step <= durable:
                return unreadable
            step, found = elected.offer.label.step, commit(elected)
            if isinstance(found, Manifest):
                return LastSave(step, found)
            logger.warning("the last save of step %d: %s", step, found.problem)
            unreadable = unreadable or LastSave(step, problem=found.problem)
            left.remove(found.offer)
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
        lambda elected: commit_elected(
            run_dir,
            store.submission,
            elected,
            lambda offer: commit_snapshot(run_dir, spec, store, offer, world_size),
            lambda offer, directory: write_piece(run_dir, store, offer, directory),
        ),
    )


def newest_durable(run_dir: RunDir) -> int:
    """Return the step of the newest checkpoint; 0 for none. Raises StorageError."""
    lineage = CheckpointStore(run_dir).lineage()
    return lineage[-1].step if lineage else 0


def commit_elected(
    run_dir: RunDir,
    submission: int,
    elected: Elected,
    commit_whole: Callable[[Offer], Manifest | Unreadable],
    write: Callable[[Offer, str], WrittenPiece | Unreadable],
) -> Manifest | Unreadable:
    """Commit an elected state as a checkpoint of a submission. Raises StorageError.

    Args:
        commit_whole: does so where a snapshot is all of it.
        write: writes a piece to the directory of the checkpoint, where the piece is.
    """
    assert elected.offer is not None
    if elected.offer.label.pieces == 1:
        return commit_whole(elected.offer)
    label = elected.offer.label
    pieces = {offer.label.piece.number: offer for offer in reversed(elected.offers)}
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
            return writer.commit(world_size=label.pieces, **facts)
    except CheckpointExists as exc:
        return checkpoints.manifest(exc.name)


@dataclass(frozen=True)
class WrittenPiece:
    """What the node of a piece has written to a checkpoint's directory."""

    entries: Mapping[str, FileEntry]
    facts: Mapping[str, Any]
    """Those of the manifest, from the first piece."""


def write_piece(
    run_dir: RunDir, store: SnapshotStore, offer: Offer, directory: str
) -> WrittenPiece | Unreadable:
    """Write a piece on this node to the directory of a checkpoint that was begun, and with the
    first one what all pieces have in common. Raises StorageError."""
    try:
        state = store.read(offer.label)
    except Exception as exc:
        return Unreadable(f"{snapshot_name(offer.label)} cannot be read: {exc}", offer)
    is_first = offer.label.piece.number == 0
    contents = piece_contents(state, with_common=is_first)
    entries = {
        name: write_beside(run_dir, directory, name, partial(save, content))
        for name, content in contents.items()
    }
    return WrittenPiece(entries, manifest_facts(state) if is_first else {})


def commit_snapshot(
    run_dir: RunDir, spec: RunSpec, store: SnapshotStore, offer: Offer, world_size: int
) -> Manifest | Unreadable:
    """Commit a snapshot of this node as a checkpoint of the store's submission. Raises
    StorageError."""
    try:
        state = store.read(offer.label)
    except Exception as exc:
        return Unreadable(f"the snapshot cannot be read: {exc}", offer)
    return commit_state(run_dir, spec, store.submission, offer.label.attempt, world_size, state)


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


# ---------------------------------------------------------------- forgotten

# Remove old snapshots that no run needs from a node's shared memory, when a worker starts there.
#
# The end of a run removes its snapshots from every reachable node. Snapshots remain on nodes that
# could not be reached, and of runs that never ended.

FORGOTTEN_S = 24 * 3600.0
"""Snapshots unchanged for this many seconds are removed, unless their run may still resume from
them."""
ABANDONED_S = 30 * FORGOTTEN_S
"""Snapshots unchanged for this many seconds are removed in any case."""


def sweep_forgotten(ctx: WorkerContext) -> threading.Thread | None:
    """Remove old snapshots of other runs from this node. Return the thread that does so; None if
    there are none.

    A thread is used because it reads the run's storage, which may be slow or unavailable.
    """
    old = [
        directory
        for directory in node_dir.shared_memory_root().iterdir()
        if directory.is_dir()
        and directory.name != ctx.run_dir.run_id
        and _age_s(directory) > FORGOTTEN_S
    ]
    if not old:
        return None
    thread = threading.Thread(
        target=_sweep, args=(old, ctx.run_dir.storage.uri), name="sweep-forgotten", daemon=True
    )
    thread.start()
    return thread


def _sweep(directories: list[Path], reached: str) -> None:
    """Remove those directories that no run needs. ``reached`` is the URI of a storage that is known
    to be available."""
    for directory in directories:
        with suppress(OSError):
            needed = any(_may_count(directory.name, label, reached) for label in _labels(directory))
            if not needed or _age_s(directory) > ABANDONED_S:
                logger.info("removing the snapshots that run %s left on this node", directory.name)
                shutil.rmtree(directory, ignore_errors=True)


def _age_s(directory: Path) -> float:
    """Return the seconds since the last change in a run's directory; 0 if it cannot be read, as
    while it is being removed."""
    try:
        return time.time() - max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
    except OSError:
        return 0.0


def _labels(directory: Path) -> list[Label]:
    """Return the labels of readable snapshots in a run's directory."""
    return [
        label
        for place in directory.iterdir()
        for label in labels_in(place)
        if label.problem is None
    ]


def _may_count(run_id: str, label: Label, reached: str) -> bool:
    """Return whether the run may still resume from a snapshot: it has not ended, and has no
    checkpoint of this step or a later one."""
    if label.storage is None:  # left by an older Everstep
        return False
    try:
        run_dir = RunDir(open_storage(label.storage), run_id)
        submission = max(run_dir.submissions(), default=0)
        if not submission:  # the run was deleted, or its storage is not mounted here
            return label.storage != reached
        return not _has_ended(run_dir, submission) and newest_durable(run_dir) < label.step
    except Exception as exc:
        logger.warning(
            "whether run %s still needs its snapshots is not known, so they stay: %s", run_id, exc
        )
        return True


def _has_ended(run_dir: RunDir, submission: int) -> bool:
    """Return whether the newest submission's journal says that the run cannot continue. Raise
    StorageError if it cannot be read."""
    events, _ = read_journal(run_dir, submission, None, 1, (EventKind.FINISHED,), past_damage=True)
    if not events:
        return False
    code = (events[0].data.get("reason") or {}).get("code")
    return events[0].data["outcome"] != "stopped" or code == ReasonCode.CANCELLED_BY_USER.value
