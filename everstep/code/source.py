"""``everstep submit --code``: user code in place of a spec's task."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

from everstep.code.pack import pack
from everstep.code.rules import MODULE_FLAG
from everstep.errors import UsageError


def with_code(
    raw: dict[str, Any] | None,
    path: str | None,
    task: str | None = None,
    train_fn: str | None = None,
    script: str | None = None,
    argv: list[str] | None = None,
) -> tuple[dict[str, Any], bytes | None]:
    """Return the spec with its code filled in, and the archive to upload before submitting it.

    Args:
        raw: fields of the spec; None if no file was given, which requires ``path``.
        path: directory or archive with the code; None leaves ``raw`` unchanged.
        task, train_fn: entry point as ``module:name``; by default the spec's.
        script: entry point as a path in the archive, or ``-m module``.
        argv: arguments of the script; None keeps the spec's.

    Raises UsageError.
    """
    given = {"task": task, "train_fn": train_fn, "script": script}
    entry = {field: value for field, value in given.items() if value}
    if path is None:
        if entry or argv:
            raise UsageError(
                "--task, --train-fn and --script select an entry point of --code; add --code "
                "DIRECTORY"
            )
        if raw is None:
            raise UsageError("give a SPEC.yaml, or --code DIRECTORY with --task MODULE:CLASS")
        return raw, None
    data = pack(path)
    spec = copy.copy(raw) if raw else {}
    code = dict(spec.get("code") or {})
    code["archive"] = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if entry:
        code = {key: value for key, value in code.items() if key not in given} | entry
    if argv:
        if not code.get("script"):
            raise UsageError(
                "arguments after -- are those of a script; add --script FILE.py, or remove them"
            )
        code["argv"] = argv
    spec["code"] = code
    name = _name_of_script(script) if script else task or train_fn or Path(path).resolve().name
    spec.setdefault("name", name.rpartition(":")[2])
    return spec, data


def _name_of_script(script: str) -> str:
    """Return a run's name for its script: ``train`` for ``pkg/train.py`` and ``-m pkg.train``."""
    module = script.removeprefix(MODULE_FLAG).strip()
    return Path(module).stem if module == script else module.rpartition(".")[2]
