"""How an attempt begins: the ranks agree on the newest trustworthy state, from memory or from a
checkpoint, and all take it over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from everstep.wire.events import EventKind
from storage.checkpoints.manifest import Manifest
from storage.checkpoints.retention import attempt_starts, reported_checkpoints
from storage.claims import claim_attempt
from storage.errors import CorruptCheckpoint
from storage.run_control import Distrust
from storage.run_dir import CheckpointName
from train_fn.checkpoints.commit import STATE_FILE, load_trusted
from train_fn.checkpoints.fork import Origin, adopt, read_origin
from train_fn.context import WorkerContext
from train_fn.errors import NonFiniteWeights, StateNotWhole
from train_fn.loop.checks import check_data, check_numerics, check_weights
from train_fn.loop.replica import Replica
from train_fn.loop.state_broadcast import broadcast
from train_fn.loop.survivor import KeptLabel, Survivor
from train_fn.snapshots.election import (
    Elected,
    Offer,
    Rejection,
    elect,
    in_lineage,
    snapshot_name,
    trusted,
)
from train_fn.snapshots.publisher import OVERHEAD_BYTES
from train_fn.snapshots.store import Label, snapshot_store
from train_fn.state.kept_state import KeptState
from train_fn.state.tensor_tree import size_bytes
from train_fn.step.peers import Peers

logger = logging.getLogger(__name__)


def restore(
    ctx: WorkerContext, replica: Replica, survivor: Survivor | None, has_kept: Sequence[bool]
) -> Restored:
    """Join the peers and restore the newest trustworthy state. On return it is the same on every
    rank. A collective.

    Args:
        survivor: what this process has kept of an earlier attempt; the replica is built of it.
        has_kept: whether each rank has kept something.

    Raises:
        StateNotWhole: the ranks go on from an older state than one that a process has kept, so that
            they need new processes.
        DataChanged: the data is not the same on all ranks, or not what the state was trained on.
        BadTask: the model is not the same on all ranks.
        ForkRefused: the run is to begin from another run's checkpoint, which cannot be used.
        StorageError: the storage does not answer, or has lost all checkpoints that the run had.
    """
    state, peers = replica.state, replica.peers
    replica.beside_kept = any(has_kept)
    if not all(has_kept):  # else an attempt before has compared them
        check_data(replica)

    def join(restored: Restored) -> None:
        is_fresh = restored.source == "fresh"
        if not all(has_kept):
            check_weights(replica, fresh=is_fresh)
        replica.join(is_fresh=is_fresh)

    adopt_origin = partial(adopt, into=state, ctx=ctx)
    kept = None if survivor is None else survivor.described.result()
    restored = take_over(ctx, peers, state, adopt_origin, before_load=join, kept=kept)
    replica.begun_at = state.step
    replica.task_state.load(state.task)
    replica.volatile.renew()
    check_numerics(ctx, replica)
    announce(ctx, state, restored)
    return restored


def take_over(
    ctx: WorkerContext,
    peers: Peers,
    state: KeptState,
    adopt_origin: Callable[[dict[str, Any], Origin], dict[str, Any]],
    *,
    before_load: Callable[[Restored], None] = lambda restored: None,
    kept: KeptLabel | None = None,
) -> Restored:
    """Claim the attempt, agree on the newest trustworthy state, and load it into ``state`` on every
    rank that lacks it. A collective.

    Args:
        adopt_origin: turns the state of another run's checkpoint into the initial one of this run.
        before_load: called before anything is loaded, with where the attempt begins.
        kept: describes ``state``, if an earlier attempt of this process has trained it.
    """
    if ctx.world_rank == 0:
        # Before anything is read that older attempts leave.
        claim_attempt(ctx.run_dir, (ctx.submission, ctx.attempt))
    restored, found = _find(ctx, peers, state, adopt_origin, kept)
    before_load(restored)
    is_mapped = restored.source == "snapshot" and found is not None
    has_it = restored.is_kept and found is not None
    if has_it or (restored.source == "fresh" and peers.rank == restored.holder):
        found = state.state_dict()
    found = broadcast(peers, found, restored.holder)
    if not has_it:
        state.load_state_dict(found, gives_memory=not is_mapped or _may_stay(ctx, found))
    snapshot_store(ctx).remove_after(state.step)
    logger.info("starting at step %d from %s", state.step, restored.checkpoint or restored.source)
    return restored


def _may_stay(ctx: WorkerContext, state: dict[str, Any]) -> bool:
    """Whether the file of a snapshot may fill shared memory for as long as this rank lives: two
    newer states fit beside it."""
    return snapshot_store(ctx).free_bytes() >= 2 * size_bytes(state) + OVERHEAD_BYTES


def announce(ctx: WorkerContext, state: KeptState, restored: Restored) -> None:
    """Report where the attempt begins."""
    if ctx.world_rank == 0:
        ctx.journal.emit(EventKind.RESTORED, _event(state, restored))
        ctx.journal.flush(0.0)  # it travels while the loader starts


def _find(
    ctx: WorkerContext,
    peers: Peers,
    kept: KeptState,
    adopt_origin: Callable[[dict[str, Any], Origin], dict[str, Any]],
    own: KeptLabel | None,
) -> tuple[Restored, dict[str, Any] | None]:
    """Agree on the state to continue from. Its holder returns the state itself, as do other ranks
    of its node that have read the same snapshot, and ranks that have kept the same state (``own``)
    in their processes. A collective.

    Rank 0 alone reads the storage, and reads a checkpoint only if no snapshot is as new. If the
    elected snapshot cannot be read, it is rejected and the ranks elect again. A snapshot from
    before the last attempt counts only if no attempt since began at an earlier step. The journals
    say so, and they are read for such a snapshot only.
    """
    own_labels = _earlier(ctx, snapshot_store(ctx).labels())
    of_ranks = list(enumerate(peers.gather((own_labels, own))))
    offers = [Offer(rank, label) for rank, (labels, _) in of_ranks for label in labels]
    kept_by = {rank: found for rank, (_, found) in of_ranks if found is not None}
    offers += [Offer(rank, found.label, in_process=True) for rank, found in kept_by.items()]
    newest_kept = max((found.label.step for found in kept_by.values()), default=-1)
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
                _require_newest(newest_kept, newest_durable)
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
        _require_newest(newest_kept, offer.label.step)
        if offer.in_process:
            has_it = own is not None and own.is_equal_to(kept_by[offer.rank])
            state = kept.state_dict() if has_it else None
            return Restored("process", offer.rank, None, struck + elected.rejected), state
        state, problem = (
            _read(ctx, kept, offer.label) if offer.label in own_labels else (None, None)
        )
        problem = peers.share(problem, offer.rank)
        if problem is None:
            return Restored("snapshot", offer.rank, None, struck + elected.rejected), state
        struck += (Rejection(snapshot_name(offer.label), problem),)
        offers = [other for other in offers if other != offer]


def _require_newest(kept: int, step: int) -> None:
    """Raise StateNotWhole if a process has kept a newer state than that of ``step``, from which the
    ranks go on. What no state holds may be from later there."""
    if kept > step:
        raise StateNotWhole(
            kept,
            f"a process has kept it, but the ranks go on from step {max(0, step)}; the next "
            "attempt needs new processes",
        )


def _read(
    ctx: WorkerContext, kept: KeptState, label: Label
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


def _earlier(ctx: WorkerContext, labels: list[Label]) -> list[Label]:
    """Return the labels that earlier attempts left. The others belong to a run of the same name and
    place that was begun anew since."""
    return [label for label in labels if label.origin < (ctx.submission, ctx.attempt)]


def _event(state: KeptState, restored: Restored) -> dict[str, Any]:
    best = state.best
    data = {
        "step": state.step,
        "epoch": state.epoch,
        "source": restored.source,
        "checkpoint": restored.checkpoint,
        "best": best and {"metric": best.metric, "value": best.value, "step": best.step},
        "rejected": [{"name": entry.name, "problem": entry.problem} for entry in restored.rejected],
    }
    return data | {"origin": asdict(restored.origin)} if restored.origin else data


# ---------------------------------------------------------------- newest checkpoint

# Where an attempt begins if no rank has a newer state: the newest checkpoint that verifies.


@dataclass(frozen=True)
class Restored:
    """Where an attempt begins. ``checkpoint`` names the checkpoint that was read, as
    ``RUN_ID/NAME`` if it is another run's."""

    source: str
    """``fresh``, ``checkpoint``, ``snapshot``, ``process`` (a rank has kept it in its memory), or
    ``fork``: from another run's checkpoint."""
    holder: int
    """Rank that has the state."""
    checkpoint: str | None
    rejected: tuple[Rejection, ...]
    origin: Origin | None = None
    """Of a fork."""

    @property
    def is_kept(self) -> bool:
        """Return whether a rank has kept the state in its process."""
        return self.source == "process"


def find_durable(
    ctx: WorkerContext,
    peers: Peers,
    kept: KeptState,
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
                origin, state = read_origin(ctx, ctx.spec.origin, adopt_origin)
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
    ctx: WorkerContext, kept: KeptState, distrusted: Sequence[Distrust], manifest: Manifest
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
