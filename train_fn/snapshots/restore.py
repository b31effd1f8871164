"""Where an attempt begins: the ranks agree on the newest trustworthy state, from memory or from a
checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from storage.checkpoints.manifest import Manifest
from storage.checkpoints.retention import attempt_starts, reported_checkpoints
from storage.checkpoints.store import CheckpointStore
from storage.errors import CorruptCheckpoint
from storage.run_control import Distrust
from storage.run_dir import CheckpointName, RunDir
from train_fn.checkpoints.commit import (
    STATE_FILE,
    load_checkpoint,
    load_common,
    load_pieces,
    load_trusted,
    num_pieces,
)
from train_fn.checkpoints.fork import read_origin
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, NonFiniteWeights, StateNotWhole
from train_fn.snapshots.election import (
    Candidate,
    Rejection,
    elect,
    in_lineage,
    snapshot_name,
    trusted,
)
from train_fn.snapshots.keeper import Adopt, Restored, StateKeeper, Unusable
from train_fn.snapshots.store import Label, snapshot_store
from train_fn.state.optim import unpacked
from train_fn.state.pieces import (
    WEIGHT,
    Move,
    Piece,
    cut_anew,
    in_one_piece,
    moves,
    needed,
    whole_shapes,
)
from train_fn.state.run_state import RunState
from train_fn.state.tensor_tree import tree_digest
from train_fn.step.peers import Peers

logger = logging.getLogger(__name__)


class _Search:
    """What is known of the states on nodes while the ranks agree on one. The same on all ranks."""

    def __init__(self, ctx: WorkerContext, peers: Peers) -> None:
        """Ask all ranks. A collective."""
        self._ctx, self._peers = ctx, peers
        labels = snapshot_store(ctx).labels()
        # others belong to a run of the same name and place that was begun anew since
        own = [each for each in labels if each.origin < (ctx.submission, ctx.attempt)]
        of_ranks = enumerate(peers.gather(own))
        candidates = [Candidate(rank, label) for rank, labels in of_ranks for label in labels]
        self.newest_durable, self.distrusted = peers.share(
            (newest_step(ctx), ctx.run_dir.distrusted()) if peers.rank == 0 else None, 0
        )
        self.candidates, self.rejected = trusted(candidates, self.distrusted)
        self._is_checked = False

    def may_be_void(self, label: Label) -> bool:
        """Return whether a later attempt may have gone on without this state."""
        ctx = self._ctx
        return not self._is_checked and label.origin < (ctx.submission, ctx.attempt - 1)

    def drop_void(self) -> None:
        """Drop the states that a later attempt has gone on without. A collective."""
        ctx, peers = self._ctx, self._peers
        starts = peers.share(attempt_starts(ctx.run_dir) if peers.rank == 0 else None, 0)
        present = (ctx.submission, ctx.attempt)
        earlier = {origin: point for origin, point in starts.items() if origin < present}
        self.candidates, void = in_lineage(self.candidates, earlier)
        self.rejected, self._is_checked = self.rejected + void, True

    def drop(self, unusable: Unusable) -> None:
        """Drop files that could not be read."""
        self.rejected += tuple(dict.fromkeys(unusable.values()))
        self.candidates = [each for each in self.candidates if each not in unusable]


def find_newest(
    ctx: WorkerContext, peers: Peers, kept: RunState, adopt_origin: Adopt, keeper: StateKeeper
) -> tuple[Restored, dict[str, Any] | None]:
    """Agree on the state to continue from: ask all ranks, drop what is void, and take the newest
    that is whole and can be read. Return the state on the ranks that have it. A collective.

    Rank 0 alone reads the storage, and reads a checkpoint only if no snapshot is as new. If the
    elected snapshot cannot be read, it is rejected and the ranks elect again. A snapshot from
    before the last attempt counts only if no attempt since began at an earlier step. The journals
    say so, and they are read for such a snapshot only.
    """
    search = _Search(ctx, peers)
    while True:
        elected = elect(search.candidates, ctx.submission)
        rejected = search.rejected + elected.rejected
        label = None if elected.candidate is None else elected.candidate.label
        if elected.candidate is None or label is None or label.step < search.newest_durable:
            restored, state = find_durable(
                ctx, peers, kept, adopt_origin, rejected, search.distrusted
            )
            search.newest_durable = step_of(restored)
            if label is None or label.step <= search.newest_durable:
                return restored, keeper.read_durable(restored, state, adopt_origin)
            # The newest checkpoints were rejected, and the snapshot is newer than the sound one.
            search.rejected = restored.rejected
        elif search.may_be_void(label):
            search.drop_void()
        else:
            state, unusable = keeper.read(elected)
            if not unusable:
                return Restored("snapshot", elected.candidate.rank, None, rejected), state
            search.drop(unusable)


# ---------------------------------------------------------------- newest checkpoint

# Where an attempt begins if no rank has a newer state: the newest checkpoint that verifies.


def find_durable(
    ctx: WorkerContext,
    peers: Peers,
    kept: RunState,
    adopt_origin: Adopt,
    rejected: tuple[Rejection, ...],
    distrusted: Sequence[Distrust],
) -> tuple[Restored, dict[str, Any] | None]:
    """Return the newest checkpoint that verifies. Rank 0 reads it. A collective.

    If there is none the run begins: anew, or from another run's checkpoint if its spec says so. The
    journals are read too. They tell a new run from one whose storage has lost its checkpoints, or
    lists none for a moment.
    """
    found: Restored | Exception | None = None
    state = None
    if peers.rank == 0:
        try:
            known = (
                reported_checkpoints(ctx.run_dir) if (ctx.submission, ctx.attempt) > (1, 1) else ()
            )
            read = partial(_load_sound, ctx, kept, distrusted)
            manifest, state, damaged = ctx.checkpoints.read_newest(read, reported=known)
            bad = (*rejected, *(Rejection(entry.name, entry.problem) for entry in damaged))
            if manifest is not None:
                found = Restored("checkpoint", 0, manifest.name, bad)
            elif ctx.spec.origin is not None:
                adopted = adopt_origin if kept.piece is None else None
                origin, state = read_origin(ctx, ctx.spec.origin, adopted)
                found = Restored("fork", 0, origin.name, bad, origin)
            else:
                found = Restored("fresh", 0, None, bad)
        except Exception as exc:
            found = exc
    found = peers.share(found, 0)
    if isinstance(found, Exception):
        raise found
    assert found is not None
    return found, state


def _load_sound(
    ctx: WorkerContext, kept: RunState, distrusted: Sequence[Distrust], manifest: Manifest
) -> dict[str, Any]:
    """Read a checkpoint. Raises CorruptCheckpoint also for a state that must not be continued
    from."""
    state = load_trusted(ctx.run_dir, manifest, distrusted)
    try:
        kept.require_sound(state)
    except (StateNotWhole, NonFiniteWeights) as exc:
        raise CorruptCheckpoint(
            manifest.name, STATE_FILE, "a state of whole steps and finite weights", str(exc)
        ) from exc
    return state


def step_of(restored: Restored) -> int:
    """Return the step of the run's own checkpoint that was found; -1 for none."""
    name = CheckpointName.parse(restored.checkpoint) if restored.checkpoint else None
    return name.step if name else -1


def newest_step(ctx: WorkerContext) -> int:
    """Return the step of the newest checkpoint that is listed, sound or not; -1 for none."""
    return max((manifest.step for manifest in ctx.checkpoints.list()), default=-1)


def read_sound(
    ctx: WorkerContext, kept: RunState, label: Label
) -> tuple[dict[str, Any] | None, str | None]:
    """Return the state of a snapshot on this node, or why it cannot be used."""
    try:
        state = snapshot_store(ctx).read(label)
        kept.require_sound(state)
    except (StateNotWhole, NonFiniteWeights) as exc:
        return None, str(exc)
    except Exception as exc:
        logger.warning("the %s cannot be read", snapshot_name(label), exc_info=exc)
        return None, f"cannot be read: {exc}"
    return state, None


# ---------------------------------------------------------------- pieces

# One rank's part of a sharded model's state, put together from pieces of a group of any size: from
# the files on its node, or from those of a checkpoint.

_OF_ITS_OWN = ("piece", "rows", "shards", "unsaved")
"""What a rank's piece holds of this rank alone."""
_IN_ALL = frozenset({*_OF_ITS_OWN, "model", "optimizer", "task"})
"""What each rank takes from its own piece, however large it is. Gates compare what is in common."""

Bad = dict[tuple[str, Label], str]
"""Files that cannot be used, by node and label, and why."""


def read_pieces(
    ctx: WorkerContext,
    peers: Peers,
    kept: RunState,
    nodes: Sequence[str],
    bring: Callable[[Mapping[Move, Label]], list[tuple[Move, str]]],
    candidates: Sequence[Candidate],
) -> tuple[dict[str, Any] | None, Bad]:
    """Return this rank's part of a state, from the pieces on its node, once those are here that lie
    on other nodes only. Or return the files that cannot be used, the same on all ranks. A
    collective.

    Args:
        nodes: the node of each rank.
        bring: brings pieces to the nodes that need them (``PieceKeeper.bring``).
    """
    assert kept.piece is not None
    of, size = candidates[0].label.pieces, kept.piece.of
    there: list[dict[int, Label]] = [{} for _ in nodes]
    for candidate in candidates:
        there[candidate.rank].setdefault(candidate.label.piece.number, candidate.label)
    needs = [needed(kept.rows.values(), of, Piece(at % size, size)) for at in range(len(nodes))]
    wanted = {move: there[move.source][move.number] for move in moves(there, needs, nodes)}
    bad: Bad = {(nodes[move.source], wanted[move]): why for move, why in bring(wanted)}
    if bad := _of_all(peers, bad):  # and every file is in its place
        return None, bad
    own_node = nodes[peers.rank]
    moved = {move.number: label for move, label in wanted.items() if nodes[move.target] == own_node}
    labels, found = {**moved, **there[peers.rank]}, {}
    for number in needs[peers.rank]:
        label = labels[number]
        state, problem = read_sound(ctx, kept, label)
        if state is not None and state.get("shards") is None:
            problem = "it is of a model that is not sharded"
        if problem is not None:
            bad[own_node, label] = problem
        if state is not None:
            found[number] = state
    if bad := _of_all(peers, bad):
        return None, bad
    has_replicas = any(candidate.label.rank >= of for candidate in candidates)
    if has_replicas and (bad := _apart(peers, own_node, labels, found)):
        return None, bad
    own = next(iter(found.values()))
    # What is small, and may differ between ranks, is that of one of them.
    rest = {name: value for name, value in own.items() if name not in _IN_ALL}
    rest = peers.share(rest if peers.rank == 0 else None, 0)
    return part_of(kept, {**own, **rest}, found, of), {}


def _apart(
    peers: Peers, node: str, labels: Mapping[int, Label], found: Mapping[int, Mapping[str, Any]]
) -> Bad:
    """Return the files of which two ranks have read different rows of one piece. Such replicas
    were not compared by a gate yet. A collective."""
    own = {
        number: (labels[number], tree_digest(piece["shards"])) for number, piece in found.items()
    }
    read = peers.gather((node, own))
    rows = [(number, at, *each) for at, of_rank in read for number, each in of_rank.items()]
    return {
        (at, label): "differs from another copy of its rows"
        for number, at, label, digest in rows
        if any(number == other and digest != theirs for other, _, _, theirs in rows)
    }


def _of_all(peers: Peers, bad: Bad) -> Bad:
    return {key: problem for each in peers.gather(bad) for key, problem in each.items()}


def part_of(
    kept: RunState, common: Mapping[str, Any], pieces: Mapping[int, Mapping[str, Any]], of: int
) -> dict[str, Any]:
    """Return this rank's part of a state: what is in common, and its rows from the pieces of a
    group of another size."""
    assert kept.piece is not None
    first = next(iter(pieces.values()))
    shards = {number: piece["shards"] for number, piece in pieces.items()}
    own = {
        "piece": tuple(kept.piece),
        "rows": first["rows"],
        "shards": cut_anew(first["rows"], shards, of, kept.piece),
        "unsaved": first.get("unsaved", common.get("unsaved")),
    }
    return {**common, **own}


def durable_part(
    ctx: WorkerContext,
    peers: Peers,
    kept: RunState,
    restored: Restored,
    common: dict[str, Any] | None,
    adopt_origin: Adopt,
) -> dict[str, Any] | None:
    """Return this rank's part of a checkpoint, read from the files that it needs. The checkpoint
    may be another run's. For a new run, return ``common`` as it is. A collective: if one rank
    fails, all raise its error.

    Args:
        common: what the pieces have in common, on the rank that has read it.
    """
    assert kept.piece is not None
    error: Exception | None = None
    if restored.checkpoint is not None:
        try:
            origin = restored.origin
            run_dir = ctx.run_dir if origin is None else RunDir(ctx.run_dir.storage, origin.run_id)
            name = restored.checkpoint if origin is None else origin.checkpoint
            manifest = CheckpointStore(run_dir).manifest(name)
            numbers = needed(kept.rows.values(), num_pieces(manifest) or 1, kept.piece)
            common, pieces = _in_pieces(kept, run_dir, manifest, common, numbers)
            if origin is not None:
                shaped = {**common["model"], **whole_shapes(next(iter(pieces.values())))}
                adopted = adopt_origin({**common, "model": shaped}, origin)
                common = {**adopted, "model": common["model"]}
            common = part_of(kept, common, pieces, num_pieces(manifest) or 1)
        except Exception as exc:
            error = exc
    if errors := [each for each in peers.gather(error) if each is not None]:
        raise errors[0]
    return common


def _in_pieces(
    kept: RunState,
    run_dir: RunDir,
    manifest: Manifest,
    common: dict[str, Any] | None,
    numbers: Sequence[int],
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return what the pieces of a checkpoint have in common, and these pieces by number. A state
    that every rank held whole is a single piece. Raises BadTask, and as ``load_checkpoint``."""
    if num_pieces(manifest):
        common = load_common(run_dir, manifest) if common is None else common
        return common, load_pieces(run_dir, manifest, numbers)
    whole = load_checkpoint(run_dir, manifest) if common is None else common
    if "own_loop" in whole:
        raise BadTask(
            f"checkpoint {manifest.name} is of a model that is not sharded; start a new run"
        )
    whole = {**whole, "optimizer": unpacked(whole["optimizer"])}
    common, piece = in_one_piece(whole, [each for each in kept.rows if each.startswith(WEIGHT)])
    return common, {0: piece}
