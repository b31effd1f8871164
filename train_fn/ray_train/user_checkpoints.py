"""Record the files of checkpoints that a user's function reports, and check later that all are
there.

Every rank may report a part, as in sharded saves, and names its files with the report. Once Ray has
all parts, the controller writes the files' names, sizes and ranks into a manifest beside them. A
run does not resume from a checkpoint that lacks a file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyarrow.fs import LocalFileSystem

from everstep.spec import plain_text
from everstep.wire import relative_names
from storage.errors import CorruptFile, StorageNotFound
from storage.run_dir import RunDir

PARTS_METRIC = "everstep_parts"
"""Metric name under which a rank sends its files to the controller."""
MANIFEST = "everstep_manifest.json"
SCHEMA_VERSION = 1
ALL = "all of it"
"""What is missing if the whole checkpoint is."""


def parts_of(checkpoint: Any) -> dict[str, int]:
    """Return the sizes in bytes of the files that a rank reports, by path; empty if they are not on
    a local file system."""
    if checkpoint is None or not isinstance(checkpoint.filesystem, LocalFileSystem):
        return {}
    root = Path(checkpoint.path)
    return {
        str(path.relative_to(root)): path.stat().st_size
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def write_manifest(
    run_dir: RunDir, directory: str, step: int, parts_by_rank: Sequence[dict[str, int]]
) -> None:
    """Write the manifest of all ranks' files into a complete reported checkpoint. Raise
    StorageError if that fails.

    If several ranks report a file with different sizes, the last write wins. The manifest then
    holds only its name.
    """
    files: dict[str, dict[str, int | None]] = {}
    for rank, parts in enumerate(parts_by_rank):
        for path, size_bytes in parts.items():
            known = files.setdefault(path, {"size_bytes": size_bytes, "rank": rank})
            if known["size_bytes"] != size_bytes:
                known["size_bytes"] = None
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "world_size": len(parts_by_rank),
        "files": files,
    }
    run_dir.files.write(
        f"{directory}/{MANIFEST}", json.dumps(manifest, indent=1, sort_keys=True).encode()
    )


def what_is_missing(run_dir: RunDir, directory: str) -> str | None:
    """Return what a reported checkpoint lacks; None if all files of its manifest are there, or if
    it has files but no manifest."""
    files = run_dir.files
    try:
        manifest = plain_text.parse_json(files.read(f"{directory}/{MANIFEST}"))
        parts = dict(manifest["files"])
        if odd := next((path for path in parts if relative_names.fault_of(path)), None):
            raise ValueError(f"it names {odd[:200]!r}")
    except StorageNotFound:
        return None if files.list(directory) else ALL
    except (CorruptFile, ValueError, KeyError, TypeError, AttributeError) as exc:
        return f"a manifest that can be read ({exc})"
    for path, known in parts.items():
        if not _has_size(run_dir, f"{directory}/{path}", known["size_bytes"]):
            return f"{path} of rank {known['rank']}"
    return None


def _has_size(run_dir: RunDir, path: str, size_bytes: int | None) -> bool:
    """Return whether a file has this size. Only its last byte is read, and that no byte follows is
    checked, so no listing is needed."""
    if not size_bytes:
        return run_dir.files.exists(path)
    try:
        with run_dir.files.open_read(path, size_bytes - 1) as stream:
            return len(stream.read(2)) == 1
    except StorageNotFound:
        return False
