"""``everstep submit --code``: code of one's own in place of a spec's task."""

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
    """The spec with its code filled in, and the archive that is to be uploaded before the spec is
    submitted.

    Args:
        raw: the spec's own fields; None where no file was given, which needs ``path``.
        path: directory or archive with the code; None leaves ``raw`` as it is.
        task, train_fn: ``module:name`` of what is run; what the spec says where neither is given.

    Raises UsageError.
    """
    if path is None:
        if task or train_fn:
            raise UsageError(
                "--task and --train-fn name something in code: give --code DIRECTORY, too"
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
