"""Decode data once per node: the first process decodes under a lock, all others map the result into
memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train_fn.node.node_dir import cache_root, once_a_node

Arrays = dict[str, NDArray[np.generic]]


def decoded_once(name: str, sources: Iterable[Path], decode: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of ``decode``, memory-mapped from this node's cache. Call it only if the
    cache does not have them.

    Args:
        name: of the data set.
        sources: files that are decoded. If the size or time of one changes, they are decoded
            again.
    """
    stamps = [
        f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in sources
    ]
    return cached(name, hashlib.sha256(repr(stamps).encode()).hexdigest()[:16], decode)


def cached(name: str, key: str, decode: Callable[[], Arrays]) -> Arrays:
    """Return the arrays that this node's cache has under ``name`` and ``key``, memory-mapped. Fill
    the cache from ``decode`` if it has none."""
    directory = cache_root() / "data" / f"{name}-{key}"
    once_a_node(directory, lambda temporary: _write(temporary, decode()))
    return {
        path.stem: np.load(path, mmap_mode="r", allow_pickle=False)
        for path in sorted(directory.glob("*.npy"))
    }


def _write(directory: Path, arrays: Arrays) -> None:
    for name, array in arrays.items():
        np.save(directory / f"{name}.npy", array, allow_pickle=False)
