"""Where an attempt begins if no rank has a newer state: the newest checkpoint that verifies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from storage.checkpoints.journal_records import reported_checkpoints
from storage.checkpoints.manifest import Manifest
from storage.errors import CorruptCheckpoint
from storage.run_control import Distrust
from storage.run_names import CheckpointName
from train_fn.checkpoints.files import STATE_FILE
from train_fn.checkpoints.fork import Origin, read_origin
from train_fn.checkpoints.reading import load_trusted
from train_fn.context import WorkerContext
from train_fn.errors import NonFiniteWeights, StateNotWhole
from train_fn.snapshots.election import Elected, Rejection
from train_fn.state.kept_state import KeptState
from train_fn.step.peers import Peers


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
