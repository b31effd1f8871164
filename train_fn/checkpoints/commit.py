"""Commit a copy of the state as a checkpoint, so that a run's lineage stays sound whatever dies.

- A state that an earlier attempt committed is not written a second time.
- Before the checkpoint becomes durable, an attempt that does not hear its journal reads from the
  storage whether it is still the newest. One that was replaced commits nothing.
- A checkpoint that exists already under the same name counts as ours only if this process wrote it:
  another process may have trained other weights.
- Old checkpoints are deleted only while the journal answers. A replaced attempt deletes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from storage.checkpoints.manifest import Manifest
from storage.checkpoints.store import CheckpointStore
from storage.checkpoints.writer import CheckpointWriter
from storage.claims import process_nonce, successor
from storage.errors import CheckpointExists, CorruptCheckpoint, StorageError, StorageNotFound
from storage.run_control import Distrust, struck_by
from storage.run_dir import RunDir
from train_fn.checkpoints.safetensors_file import write_safetensors
from train_fn.checkpoints.save_slot import Save
from train_fn.context import WorkerContext
from train_fn.errors import FOUND_WITHIN, Replaced
from train_fn.state.pieces import Piece

CONFIRM_S = 2.0
"""Longest wait for a journal that has not answered for a while, before old checkpoints are
deleted."""

logger = logging.getLogger(__name__)


Collect = Callable[[CheckpointWriter, int, Callable[[], None]], None]


class Committed(NamedTuple):
    """Describe the checkpoint that holds a save's state."""

    manifest: Manifest | None
    """None if an earlier attempt committed the same state."""
    is_new: bool
    """Whether nobody has reported it yet."""


class Committer:
    """Commit checkpoints of one attempt.

    Args:
        begun_at: steps done when the attempt began.
        on_write: called whenever the storage has taken bytes.
        collect: lets the other ranks of a sharded model add their pieces to the checkpoint of a
            step.
    """

    def __init__(
        self,
        ctx: WorkerContext,
        begun_at: int,
        on_write: Callable[[], None],
        collect: Collect | None = None,
    ) -> None:
        self._ctx, self._begun_at, self._on_write = ctx, begun_at, on_write
        self._collect = collect
        self._store = ctx.checkpoints
        self._tried: str | None = None
        """Name of the checkpoint that the last try was to commit. If it is found committed although
        the try failed, it is ours."""

    def commit(self, save: Save) -> Committed:
        """Commit the state of ``save``, unless a checkpoint holds it already.

        Raises:
            Replaced: a newer attempt has taken over.
            CheckpointExists: another process wrote a checkpoint of this name.
            StorageError: the storage failed; the next call tries again.
        """
        if self._is_there(save):
            return Committed(None, is_new=False)
        try:
            return Committed(self._write(save), is_new=True)
        except CheckpointExists as exc:
            # An earlier try committed it but lost the answer. It was just read back complete.
            return Committed(self._own(exc), is_new=exc.name == self._tried)

    def _is_there(self, save: Save) -> bool:
        """Return whether the state that this attempt began with is a checkpoint of the lineage
        already. An earlier attempt committed it, and may have died before it reported that.

        The best state is saved all the same, under the name that the state has for it.
        """
        state = save.copy.state
        if save.is_best or save.copy.step != self._begun_at:
            return False
        facts = manifest_facts(state)
        wanted = save.copy.step, facts["sample_digest"], facts["metrics"]
        present = self._ctx.submission, self._ctx.attempt
        for manifest in self._store.lineage():
            is_earlier = (manifest.submission, manifest.attempt) != present
            if is_earlier and (manifest.step, manifest.sample_digest, manifest.metrics) == wanted:
                with suppress(CorruptCheckpoint, StorageNotFound):
                    self._store.verify(manifest.name)
                    return True
        return False

    def _write(self, save: Save) -> Manifest:
        ctx, state = self._ctx, save.copy.state
        safetensors = ctx.spec.checkpoint.safetensors
        with self._store.begin(save.copy.step, ctx.submission, ctx.attempt) as writer:
            write_files(writer, state, safetensors=safetensors, on_write=self._on_write)
            if self._collect is not None:
                self._collect(writer, save.copy.step, self._on_write)
            self._tried = writer.name
            if not ctx.holds_lease(0.0):
                self._require_newest()
            return writer.commit(world_size=ctx.world_size, **manifest_facts(state))

    def _require_newest(self) -> None:
        """Raise Replaced if the storage holds the claim of a newer attempt."""
        ctx = self._ctx
        why = successor(ctx.run_dir, (ctx.submission, ctx.attempt))
        if why is not None:
            ctx.on_replaced(why)
            raise Replaced(why)

    def _own(self, exists: CheckpointExists) -> Manifest:
        """Return the existing checkpoint if this process wrote it. Raise CheckpointExists if
        another process did."""
        manifest = self._store.manifest(exists.name)
        if manifest.writer != process_nonce():
            raise exists
        return manifest

    def retain(self, save: Save, written: Manifest) -> Sequence[str]:
        """Delete the checkpoints that retention releases. Return their names."""
        ctx, spec = self._ctx, self._ctx.spec.checkpoint
        if not ctx.holds_lease(CONFIRM_S):
            logger.warning("the journal does not answer; old checkpoints stay until it does")
            return ()
        try:
            origin = (ctx.submission, ctx.attempt)
            # Only ranks of Everstep's own loop compare their weights.
            is_compared = ctx.world_size > 1 and not ctx.spec.runs_own_function
            proven_after = FOUND_WITHIN if is_compared else 0
            return self._store.retain(
                spec.keep_latest, save.best, origin, written, ctx.spec.best_by, proven_after
            )
        except StorageError:
            logger.exception("old checkpoints could not be deleted; the next save tries again")
            return ()


# ---------------------------------------------------------------- files

# Write a state as the files of a checkpoint, and return its facts for the manifest. Both a rank's
# saver and a run's last save use this.

MODEL_FILE = "model.pt"
"""The model's plain ``state_dict`` on the CPU, without the frozen parameters that the run leaves
out."""
EMA_FILE = "model_ema.pt"
"""The same with averaged weights, if the run keeps them."""
STATE_FILE = "train_state.pt"
"""Everything else of TrainState."""


def write_files(
    writer: CheckpointWriter,
    state: Mapping[str, Any],
    *,
    safetensors: bool,
    on_write: Callable[[], None] = lambda: None,
) -> None:
    """Write the files of ``state``, a complete ``TrainState.state_dict`` on the CPU.

    Args:
        on_write: called whenever the storage has taken bytes.
    """
    for name, write in files_of(state, safetensors=safetensors).items():
        with writer.write_file(name, on_write) as file:
            write(file)
        on_write()


def files_of(
    state: Mapping[str, Any], *, safetensors: bool, with_common: bool = True
) -> dict[str, Callable[[Any], None]]:
    """Return what writes each file of a state, or of a rank's piece of one.

    Args:
        with_common: also what all pieces have in common.
    """
    if state.get("shards") is not None:
        contents = piece_contents(state, with_common=with_common)
        return {name: partial(torch.save, content) for name, content in contents.items()}
    rest = dict(state)
    model, ema = rest.pop("model"), rest.pop("ema")
    weights = {MODEL_FILE: model} if ema is None else {MODEL_FILE: model, EMA_FILE: model | ema}
    files: dict[str, Callable[[Any], None]] = {STATE_FILE: partial(torch.save, rest)}
    for name, content in weights.items():
        files[name] = partial(torch.save, content)
        if safetensors:
            files[name.removesuffix(".pt") + ".safetensors"] = partial(write_safetensors, content)
    return files


def piece_contents(state: Mapping[str, Any], *, with_common: bool) -> dict[str, Any]:
    """Return what the files of a rank's piece of a checkpoint hold, by name: the rows of each
    tensor that are its own, and how many there are in all.

    Args:
        with_common: also what all pieces have in common.
    """
    own = {name: state.get(name) for name in ("piece", "rows", "shards", "unsaved")}
    common = {STATE_FILE: {**state, "shards": None}} if with_common else {}
    return {**common, piece_file(Piece(*state["piece"])): own}


def piece_file(piece: Piece) -> str:
    """Return the name of a piece's file."""
    return f"piece-{piece.number:05d}-of-{piece.of:05d}.pt"


def num_pieces(manifest: Manifest) -> int:
    """Return how many pieces make up a sharded state. Return 0 for a state that is whole. Raise
    CorruptCheckpoint if pieces are missing."""
    found = sorted(name for name in manifest.files if name.startswith("piece-"))
    if found != [piece_file(Piece(number, len(found))) for number in range(len(found))]:
        raise CorruptCheckpoint(manifest.name, found[0], "all pieces", f"{len(found)} of them")
    return len(found)


def manifest_facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about ``state`` for the manifest, as arguments of
    ``CheckpointWriter.commit``."""
    return {
        "epoch": state["epoch"],
        "parent": state["parent"],
        "sample_digest": state["ledger"]["chain"],
        "chain": state.get("chain"),
        "parameters": "trainable" if state.get("frozen") else None,
        # otherwise the metrics belong to other weights
        "metrics": state["metrics"] if state["evaluated_step"] == state["step"] else {},
    }


# ---------------------------------------------------------------- reading

# Load a checkpoint's state from storage. Files are read once and verified while they are read.

_LOADED = (MODEL_FILE, STATE_FILE, EMA_FILE)


def load_trusted(
    run_dir: RunDir, manifest: Manifest, distrusted: Iterable[Distrust]
) -> dict[str, Any]:
    """Like ``load_checkpoint``, but raise CorruptCheckpoint also for a state that may hold wrong
    bits.

    Args:
        distrusted: ``RunDir.distrusted``.
    """
    entry = struck_by(distrusted, (manifest.submission, manifest.attempt), manifest.step)
    if entry is not None:
        raise CorruptCheckpoint(
            manifest.name, STATE_FILE, "a state from before ranks went apart", entry.problem
        )
    return load_checkpoint(run_dir, manifest)


def load_checkpoint(run_dir: RunDir, manifest: Manifest) -> dict[str, Any]:
    """Return the state in a checkpoint, on the CPU, for ``TrainState.load_state_dict``.

    Files are read in parallel. Those that are not loaded are verified, too. Raise CorruptCheckpoint
    if a file does not match the manifest, StorageNotFound, or StorageError.
    """

    store = CheckpointStore(run_dir)

    def read(file: str) -> Any:
        if file not in _LOADED:
            return store.verify_file(manifest.name, file)
        return store.load_file(manifest.name, file, _load)

    is_sharded = num_pieces(manifest) > 0
    files = sorted({STATE_FILE, *manifest.files, *(() if is_sharded else (MODEL_FILE,))})
    with ThreadPoolExecutor(len(_LOADED)) as pool:
        trees = dict(zip(files, pool.map(read, files), strict=True))
    if is_sharded:
        return {**trees[STATE_FILE], "parent": manifest.name}
    return {
        **trees[STATE_FILE],
        "model": trees[MODEL_FILE],
        "ema": trees.get(EMA_FILE),
        "parent": manifest.name,
    }


_load = partial(torch.load, map_location="cpu", weights_only=True)


def load_common(run_dir: RunDir, manifest: Manifest) -> dict[str, Any]:
    """Return what the pieces of a checkpoint have in common. Raises as ``load_checkpoint``."""
    common = CheckpointStore(run_dir).load_file(manifest.name, STATE_FILE, _load)
    return {**common, "parent": manifest.name}


def load_pieces(
    run_dir: RunDir, manifest: Manifest, numbers: Iterable[int]
) -> dict[int, dict[str, Any]]:
    """Return these pieces of a checkpoint by number, as ``piece_contents`` has them. Raises as
    ``load_checkpoint``."""
    store, of = CheckpointStore(run_dir), num_pieces(manifest)
    found = {}
    for number in numbers:
        name = piece_file(Piece(number, of))
        found[number] = store.load_file(manifest.name, name, _load)
        if tuple(found[number]["piece"]) != (number, of):
            raise CorruptCheckpoint(
                manifest.name, name, str(Piece(number, of)), str(found[number]["piece"])
            )
    return found
