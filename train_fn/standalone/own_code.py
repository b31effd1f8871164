"""A user's code that comes from a directory of this host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from everstep.errors import UsageError
from everstep.spec.run_spec import RunSpec
from storage.code.store import CodeStore
from storage.filesystem import Storage
from train_fn.user_code.modules import work_on


@dataclass(frozen=True)
class OwnCode:
    """A user's code that is not uploaded to the service."""

    archive: bytes
    path: Path
    """What it was packed from: a directory, or an archive."""


def bring_code(spec: RunSpec, storage: Storage, code: OwnCode | None) -> None:
    """Make a spec's code importable in this process. Raises UsageError if the code is not given or
    cannot run here."""
    if spec.code is None:
        return
    if spec.code.script is not None:
        raise UsageError(
            "code.script is a script for torchrun: run it with torchrun itself, as in `torchrun "
            "--nproc-per-node 2 train.py`; `everstep submit` gives it to the service"
        )
    if spec.code.train_fn is not None:
        raise UsageError(
            "code.train_fn runs under Ray Train alone; `everstep submit` gives it to the service"
        )
    if code is None:
        raise UsageError(
            "the spec names code of its own by a digest; give --code DIRECTORY, the code itself"
        )
    if code.path.is_dir():
        work_on(code.archive, code.path)
    else:
        CodeStore(storage).put(code.archive)
