"""Load a checkpoint's state from storage. Files are read once and verified while they are read."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from storage.checkpoints.manifest import Manifest
from storage.checkpoints.store import CheckpointStore
from storage.errors import CorruptCheckpoint
from storage.run_control import Distrust, struck_by
from storage.run_dir import RunDir
from train_fn.checkpoints.files import EMA_FILE, MODEL_FILE, STATE_FILE

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
        return store.load_file(
            manifest.name, file, partial(torch.load, map_location="cpu", weights_only=True)
        )

    files = sorted({MODEL_FILE, STATE_FILE, *manifest.files})
    with ThreadPoolExecutor(len(_LOADED)) as pool:
        trees = dict(zip(files, pool.map(read, files), strict=True))
    return {
        **trees[STATE_FILE],
        "model": trees[MODEL_FILE],
        "ema": trees.get(EMA_FILE),
        "parent": manifest.name,
    }
