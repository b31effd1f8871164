"""Where an attempt begins: the ranks agree on the newest trustworthy state, from memory or from a
checkpoint. Below: how it reaches them all.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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
from train_fn.checkpoints.fork import Origin, read_origin
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, NonFiniteWeights, StateNotWhole
from train_fn.snapshots.election import (
    Elected,
    Offer,
    Rejection,
    elect,
    in_lineage,
    snapshot_name,
    trusted,
)
from train_fn.snapshots.holdings import Holdings
from train_fn.snapshots.state_file import Window, lent, machine, read_memory, word_sums
from train_fn.snapshots.store import Label, snapshot_store
from train_fn.state.optim import unpacked
from train_fn.state.pieces import (
    WEIGHT,
    Piece,
    cut_anew,
    in_one_piece,
    moves,
    needed,
    whole_shapes,
)
from train_fn.state.run_state import RunState
from train_fn.state.tensor_tree import (
    TensorShape,
    put_together,
    room_for,
    shapes,
    take_apart,
    tree_digest,
)
from train_fn.step.fingerprints import word_sum
from train_fn.step.peers import Peers

logger = logging.getLogger(__name__)


def find_newest(
    ctx: WorkerContext,
    peers: Peers,
    kept: RunState,
    adopt_origin: Callable[[dict[str, Any], Origin], dict[str, Any]],
    holdings: Holdings | None = None,
) -> tuple[Restored, dict[str, Any] | None]:
    """Agree on the state to continue from. Its holder returns the state itself, as do other ranks
    of its node that have read the same snapshot. A collective.

    Rank 0 alone reads the storage, and reads a checkpoint only if no snapshot is as new. If the
    elected snapshot cannot be read, it is rejected and the ranks elect again. A snapshot from
    before the last attempt counts only if no attempt since began at an earlier step. The journals
    say so, and they are read for such a snapshot only.

    Args:
        holdings: of a sharded model. Each rank then returns its own part of the state, unless the
            run is new, and none travels from one rank to all.
    """
    labels = snapshot_store(ctx).labels()
    # others belong to a run of the same name and place that was begun anew since
    own_labels = [each for each in labels if each.origin < (ctx.submission, ctx.attempt)]
    of_ranks = enumerate(peers.gather(own_labels))
    offers = [Offer(rank, label) for rank, labels in of_ranks for label in labels]
    newest_durable, distrusted = peers.share(
        (newest_step(ctx), ctx.run_dir.distrusted()) if peers.rank == 0 else None, 0
    )
    offers, struck = trusted(offers, distrusted)
    checked = False
    while True:
        elected = elect(offers, ctx.submission)
        offer = elected.offer
        if offer is None or offer.label.step < newest_durable:
            restored, state = find_durable(
                ctx, peers, kept, adopt_origin, elected, struck, distrusted
            )
            newest_durable = step_of(restored)
            if offer is None or offer.label.step <= newest_durable:
                if kept.piece is not None:
                    state = durable_part(ctx, peers, kept, restored, state, adopt_origin)
                return restored, state
            # The newest checkpoints were rejected, and the snapshot is newer than the one that is
            # sound.
            struck = restored.rejected
            continue
        if offer.label.origin < (ctx.submission, ctx.attempt - 1) and not checked:
            starts = peers.share(attempt_starts(ctx.run_dir) if peers.rank == 0 else None, 0)
            present = (ctx.submission, ctx.attempt)
            offers, void = in_lineage(
                offers, {origin: point for origin, point in starts.items() if origin < present}
            )
            struck, checked = struck + void, True
            continue
        if holdings is not None:
            state, found = read_pieces(ctx, peers, kept, holdings, elected.offers)
            if not found:
                return Restored("snapshot", offer.rank, None, struck + elected.rejected), state
            offers = [
                each for each in offers if (holdings.nodes[each.rank], each.label) not in found
            ]
            struck += tuple(
                Rejection(f"{snapshot_name(label)} on node {node}", problem)
                for (node, label), problem in found.items()
            )
            continue
        if offer.label.pieces > 1:
            raise BadTask(
                f"the state of step {offer.label.step} is of a sharded model; shard this one by "
                "fully_shard as well, or start a new run"
            )
        state, problem = (
            _read(ctx, kept, offer.label) if offer.label in own_labels else (None, None)
        )
        problem = peers.share(problem, offer.rank)
        if problem is None:
            return Restored("snapshot", offer.rank, None, struck + elected.rejected), state
        struck += (Rejection(snapshot_name(offer.label), problem),)
        offers = [other for other in offers if other != offer]


def _read(
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


# ---------------------------------------------------------------- newest checkpoint

# Where an attempt begins if no rank has a newer state: the newest checkpoint that verifies.


@dataclass(frozen=True)
class Restored:
    """Where an attempt begins. ``checkpoint`` names the checkpoint that was read, as
    ``RUN_ID/NAME`` if it is another run's."""

    source: str
    """``fresh``, ``checkpoint``, ``snapshot``, or ``fork``: from another run's checkpoint."""
    holder: int
    """Rank that has the state."""
    checkpoint: str | None
    rejected: tuple[Rejection, ...]
    origin: Origin | None = None
    """Of a fork."""


def find_durable(
    ctx: WorkerContext,
    peers: Peers,
    kept: RunState,
    adopt_origin: Callable[[dict[str, Any], Origin], dict[str, Any]],
    elected: Elected,
    struck: tuple[Rejection, ...],
    distrusted: Sequence[Distrust],
) -> tuple[Restored, dict[str, Any] | None]:
    """Return the newest checkpoint that verifies. Rank 0 reads it. A collective.

    If there is none the run begins: anew, or from another run's checkpoint if its spec says so. The
    journals are read too: a storage that has lost its checkpoints, or lists none for a moment, must
    not look like that of a new run.
    """
    found: Restored | Exception | None = None
    state = None
    if peers.rank == 0:
        try:
            known = (
                reported_checkpoints(ctx.run_dir) if (ctx.submission, ctx.attempt) > (1, 1) else ()
            )
            read = partial(_load_sound, ctx, kept, distrusted)
            manifest, state, rejected = ctx.checkpoints.read_newest(read, reported=known)
            bad = (
                *struck,
                *elected.rejected,
                *(Rejection(entry.name, entry.problem) for entry in rejected),
            )
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


# ---------------------------------------------------------------- pieces

# The state of a sharded model, elected as above: each rank gets the rows that are its own.


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
    holdings: Holdings,
    offers: Sequence[Offer],
) -> tuple[dict[str, Any] | None, Bad]:
    """Return this rank's part of a state, from the pieces on its node, once those are here that lie
    on other nodes only. Or return the files that cannot be used, the same on all ranks. A
    collective.
    """
    assert kept.piece is not None
    nodes, of, size = holdings.nodes, offers[0].label.pieces, kept.piece.of
    there: list[dict[int, Label]] = [{} for _ in nodes]
    for offer in offers:
        there[offer.rank].setdefault(offer.label.piece.number, offer.label)
    needs = [needed(kept.rows.values(), of, Piece(at % size, size)) for at in range(len(nodes))]
    wanted = {move: there[move.source][move.number] for move in moves(there, needs, nodes)}
    bad: Bad = {(nodes[move.source], wanted[move]): why for move, why in holdings.bring(wanted)}
    if bad := _of_all(peers, bad):  # and every file is in its place
        return None, bad
    own_node = nodes[peers.rank]
    moved = {move.number: label for move, label in wanted.items() if nodes[move.target] == own_node}
    labels, found = {**moved, **there[peers.rank]}, {}
    for number in needs[peers.rank]:
        label = labels[number]
        state, problem = _read(ctx, kept, label)
        if state is not None and state.get("shards") is None:
            problem = "it is of a model that is not sharded"
        if problem is not None:
            bad[own_node, label] = problem
        if state is not None:
            found[number] = state
    if bad := _of_all(peers, bad):
        return None, bad
    has_replicas = any(offer.label.rank >= of for offer in offers)
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
    adopt_origin: Callable[[dict[str, Any], Origin], dict[str, Any]],
) -> dict[str, Any] | None:
    """Return this rank's part of a checkpoint, of this run or another one, from the files that it
    needs; for a new run, ``common`` as it is. A collective: an error of one rank is raised by all.

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


# ---------------------------------------------------------------- broadcast

# A restored state on its way from the rank that has it to all others.

CHUNK_BYTES = 32 << 20
"""Tensors travel in pieces of about this size, so that a rank needs little more memory than the
state takes."""
_IN_FLIGHT = 2
"""Pieces that travel while an earlier one is checked."""


class _Sent(NamedTuple):
    """A piece on its way: tensors of one dtype in a row."""

    part: list[TensorShape]
    flat: torch.Tensor
    work: dist.Work | None


def broadcast(
    peers: Peers,
    state: dict[str, Any] | None,
    holder: int,
    memory: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return ``state`` of rank ``holder`` on every rank. A collective.

    Other ranks pass None, or the same state if they have it already. Nothing travels if all have
    it. Otherwise the structure travels first, then the tensors, in pieces of one dtype. If all that
    lack it are on the holder's machine, they read its memory instead. Every rank compares what
    arrived with what the holder sent before anything is returned.

    Args:
        memory: nested dicts of tensors that may be overwritten. Those of the state that fit take
            their memory, so that to load them copies nothing.

    Raises:
        PeersGone: a peer is gone, so that the state did not arrive whole.
        StateNotWhole: other bytes arrived than the holder sent.
    """
    lacking = peers.gather(machine() if state is None else None)
    if state is not None and not any(each is not None for each in lacking):
        return state
    tensors: list[torch.Tensor] = []
    own = take_apart(state, tensors) if peers.rank == holder else None
    is_read = peers.on_cpu and peers.rank == holder and {*lacking} - {None} == {machine()}
    with lent(tensors) if is_read else nullcontext() as window:
        skeleton, window = peers.share((own, window), holder)
        if window is not None:
            room = room_for(skeleton, memory) if state is None else None
            if _read_beside(peers, skeleton, window, holder, tensors, room):
                read: dict[str, Any] = state or put_together(skeleton, room or [])
                return read
    parts = _chunks(sorted(shapes(skeleton), key=lambda shape: shape.position))
    sums, arrived = [tree_digest(skeleton)], []
    for sent in _in_flight(peers, parts, tensors, holder):
        if sent.work is not None:
            sent.work.wait()
        flat = peers.result(sent.flat)
        sums.append(str(word_sum(flat)))
        if state is None:
            pieces = torch.split(flat, [shape.numel for shape in sent.part])
            arrived += [
                piece.view(shape.shape) for shape, piece in zip(sent.part, pieces, strict=True)
            ]
    _require_the_same(peers, sums, holder, skeleton["step"])
    if state is not None:
        return state
    received: dict[str, Any] = put_together(skeleton, arrived)
    return received


def _read_beside(
    peers: Peers,
    skeleton: dict[str, Any],
    window: Window,
    holder: int,
    tensors: list[torch.Tensor],
    room: list[torch.Tensor] | None,
) -> bool:
    """Read the holder's tensors into ``room``. Return whether all ranks could that lack them. A
    collective.

    Args:
        tensors: those of the holder.
        room: None on a rank that needs nothing.
    """
    sums: list[int] | None = None
    if peers.rank == holder:
        sums = word_sums(tensors)
    elif room is not None:
        try:
            sums = read_memory(window, room)
        except OSError as exc:
            logger.info("the state is sent, since its holder's memory cannot be read: %s", exc)
    mine = None if sums is None else _digest_of([tree_digest(skeleton), *map(str, sums)])
    found = peers.gather((mine, room is not None and sums is None))
    if any(is_refused for _, is_refused in found):
        return False
    read = {rank: each for rank, (each, _) in enumerate(found) if each is not None}
    _require_equal(read, holder, skeleton["step"])
    return True


def _in_flight(
    peers: Peers, parts: list[list[TensorShape]], tensors: list[torch.Tensor], holder: int
) -> Iterator[_Sent]:
    """Start to send each part, and yield it once the next ones travel, too."""
    waiting: deque[_Sent] = deque()
    for part in parts:
        flat = _flat(peers, part, tensors if peers.rank == holder else None)
        waiting.append(_Sent(part, flat, peers.start_broadcast(flat, holder)))
        if len(waiting) > _IN_FLIGHT:
            yield waiting.popleft()
    yield from waiting


def _flat(
    peers: Peers, part: list[TensorShape], tensors: list[torch.Tensor] | None
) -> torch.Tensor:
    """Return the part's tensors in a row, or memory for them."""
    if tensors is None:
        num_elements = sum(shape.numel for shape in part)
        return torch.empty(num_elements, dtype=part[0].dtype, device=peers.device)
    rows = [tensors[shape.position].to(peers.device).reshape(-1) for shape in part]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _require_the_same(peers: Peers, sums: list[str], holder: int, step: int) -> None:
    """Raise StateNotWhole on every rank if one of them received other bytes than were sent."""
    digests = peers.gather(_digest_of(sums))
    _require_equal(dict(enumerate(digests)), holder, step)


def _digest_of(sums: list[str]) -> str:
    return hashlib.sha256(repr(sums).encode()).hexdigest()


def _require_equal(digests: Mapping[int, str], holder: int, step: int) -> None:
    differing = [rank for rank, digest in digests.items() if digest != digests[holder]]
    if differing:
        raise StateNotWhole(
            step,
            f"rank {', '.join(map(str, differing))} received other bytes than rank {holder} sent. "
            "Have the network between their nodes checked",
        )


def _chunks(tensors: list[TensorShape]) -> list[list[TensorShape]]:
    """Group tensors of one dtype into pieces not much larger than CHUNK_BYTES, in order."""
    chunks: list[list[TensorShape]] = []
    size = 0
    for tensor in tensors:
        if not chunks or chunks[-1][0].dtype != tensor.dtype or size >= CHUNK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(tensor)
        size += tensor.nbytes
    return chunks
