"""Index the images below a directory once per node, for all its ranks and loader processes.

If every rank of every attempt listed a million files, each recovery would wait for it. The index is
in this node's cache as flat arrays that are mapped into memory. It is valid while no directory has
changed: adding, removing or renaming a file changes its directory's time, and a node checks only
those few times.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train_fn.data.cache import Arrays, cached
from train_fn.node.node_dir import cache_root, node_lock

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
_SETTLED_NS = 2_000_000_000
"""A directory that changed so shortly before may change again without showing it: clocks of file
systems are coarse."""

Stamps = dict[str, int]
"""Modification time of every directory, in nanoseconds; -1 for one that is gone."""


@dataclass(frozen=True)
class ImageIndex:
    """The images of one split by class and path. ``fingerprint`` covers classes, paths and
    sizes."""

    split: Path
    paths: NDArray[np.uint8]
    """All paths below ``split``, one after another."""
    ends: NDArray[np.int64]
    """[n]: where each path ends."""
    labels: NDArray[np.int64]
    """[n]"""
    fingerprint: str

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        start = int(self.ends[index - 1]) if index else 0
        return self.split / os.fsdecode(self.paths[start : int(self.ends[index])].tobytes())


def index_images(split: Path, classes: list[str]) -> ImageIndex:
    """Return the images below ``split/CLASS`` in a fixed order, from this node's cache while no
    directory has changed."""
    name = hashlib.sha256(f"{split.resolve()} {classes}".encode()).hexdigest()[:16]
    known = cache_root() / "data" / f"image_folder-{name}.json"
    with node_lock(known.with_suffix(".lock")):
        arrays = _cached(split, classes, known)
    digest = bytes(arrays["digest"].tobytes()).decode()
    paths, ends, labels = (np.asarray(arrays[part]) for part in ("paths", "ends", "labels"))
    return ImageIndex(split, paths, ends, labels, digest)


def _cached(split: Path, classes: list[str], known: Path) -> dict[str, Any]:
    stamps: Stamps | None = None
    with suppress(OSError, ValueError):
        stamps = dict(json.loads(known.read_text()))
    if stamps is not None and stamps == _stamps(list(stamps)):
        with suppress(_NotCached):
            return cached("image_folder", _key(stamps), _not_cached)
    began = time.time_ns()
    arrays, directories = _scan(split, classes)
    stamps = _stamps(directories)
    if not len(arrays["labels"]) or max(stamps.values()) > began - _SETTLED_NS:
        return arrays
    known.parent.mkdir(parents=True, exist_ok=True)
    temporary = known.with_suffix(".tmp")
    temporary.write_text(json.dumps(stamps))
    temporary.replace(known)
    return cached("image_folder", _key(stamps), lambda: arrays)


class _NotCached(Exception):
    """The cache lost the index, but not its stamps."""


def _not_cached() -> Arrays:
    raise _NotCached


def _key(stamps: Stamps) -> str:
    return hashlib.sha256(json.dumps(stamps, sort_keys=True).encode()).hexdigest()[:16]


def _stamps(directories: list[str]) -> Stamps:
    stamps = {}
    for directory in directories:
        try:
            stamps[directory] = Path(directory).stat().st_mtime_ns
        except OSError:
            stamps[directory] = -1
    return stamps


def _scan(split: Path, classes: list[str]) -> tuple[Arrays, list[str]]:
    """Return the arrays of the index, and every directory that was read. Raises OSError."""
    directories = [str(split)]
    paths: list[bytes] = []
    labels: list[int] = []
    hashed = hashlib.sha256()
    for label, name in enumerate(classes):
        found = []
        for directory, inner, files in os.walk(split / name, followlinks=True):
            inner.sort()
            directories.append(directory)
            found += [
                Path(directory, file) for file in files if Path(file).suffix.lower() in SUFFIXES
            ]
        for path in sorted(found):
            relative = path.relative_to(split)
            hashed.update(
                f"{label} {relative} {path.stat().st_size}\n".encode(errors="surrogateescape")
            )
            paths.append(os.fsencode(relative))
            labels.append(label)
    arrays: Arrays = {
        "paths": np.frombuffer(b"".join(paths), dtype=np.uint8),
        "ends": np.cumsum([len(path) for path in paths], dtype=np.int64),
        "labels": np.array(labels, dtype=np.int64),
        "digest": np.frombuffer(hashed.hexdigest().encode(), dtype=np.uint8),
    }
    return arrays, directories
