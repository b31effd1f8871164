"""What a user's function reports as a checkpoint, and what says later whether all of it is there.

Every rank may bring a part, as sharded saves do. Each tells with its report which files it brings;
once Ray has them all, the controller writes their names, sizes and ranks beside them. A checkpoint
that lacks one of them is not gone on from.
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
"""Name under which a rank's files travel with its metrics, to the controller."""
MANIFEST = "everstep_manifest.json"
SCHEMA_VERSION = 1
ALL = "all of it"
"""What a checkpoint lacks that is not there."""


def parts_of(checkpoint: Any) -> dict[str, int]:
    """Sizes in bytes of the files that a rank reports, by path; nothing where they do not lie on
    its own disk."""
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
    """Name all ranks' files in a reported checkpoint that is complete. Raises StorageError.

    A file that several ranks brought in different sizes is whoever's came last: of such one only
    the name is known.
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
    """What a reported checkpoint lacks; None where all that its manifest names is there, or nobody
    wrote one."""
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
    """By its last byte, after which there must be none: no listing, and no reading of the whole."""
    if not size_bytes:
        return run_dir.files.exists(path)
    try:
        with run_dir.files.open_read(path, size_bytes - 1) as stream:
            return len(stream.read(2)) == 1
    except StorageNotFound:
        return False
