"""``everstep submit --code``: user code in place of a spec's task."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

from everstep.code.pack import pack
from everstep.errors import UsageError


def with_code(
    raw: dict[str, Any] | None, path: str | None, task: str | None, train_fn: str | None
) -> tuple[dict[str, Any], bytes | None]:
    """Return the spec with its code filled in, and the archive to upload before submitting it.

    Args:
        raw: fields of the spec; None if no file was given, which requires ``path``.
        path: directory or archive with the code; None leaves ``raw`` unchanged.
        task, train_fn: entry point as ``module:name``; by default the spec's.

    Raises UsageError.
    """
    if path is None:
        if task or train_fn:
            raise UsageError(
                "--task and --train-fn select an entry point of --code; add --code DIRECTORY"
            )
        if raw is None:
            raise UsageError("give a SPEC.yaml, or --code DIRECTORY with --task MODULE:CLASS")
        return raw, None
    data = pack(path)
    spec = copy.copy(raw) if raw else {}
    code = dict(spec.get("code") or {})
    code["archive"] = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if task or train_fn:
        code = {key: value for key, value in code.items() if key not in ("task", "train_fn")}
        code |= {key: value for key, value in (("task", task), ("train_fn", train_fn)) if value}
    spec["code"] = code
    spec.setdefault("name", (task or train_fn or Path(path).resolve().name).rpartition(":")[2])
    return spec, data
