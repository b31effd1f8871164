"""An uploaded task on a rank of its own, changed line by line."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from storage.code import CodeStore
from storage.filesystem import Storage, open_storage
from storage.run_dir import RunDir
from tests.support.code_archives import TASK, tar_gz
from tests.support.one_rank import one_rank
from train_fn.context import WorkerContext
from train_fn.loop.attempt import train
from train_fn.node.node_dir import snapshots_dir
from train_fn.recovery.evidence import RankError, StepFailed, describe_error
from train_fn.user_code import modules as own_code


@pytest.fixture(autouse=True)
def own_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache, a path and modules of this test's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before, path = set(sys.modules), list(sys.path)
    deterministic = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if own_code._is_uploaded(sys.modules[name]):
            del sys.modules[name]
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    shutil.rmtree(snapshots_dir("run_own"), ignore_errors=True)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "storage"))


def context(
    storage: Storage,
    source: str | bytes,
    entry: str = "task:Line",
    submission: int = 1,
    **fields: Any,
) -> WorkerContext:
    archive = source if isinstance(source, bytes) else tar_gz({"task.py": source})
    stored = CodeStore(storage).put(archive)
    train_spec = {
        "global_batch_size": 16,
        "micro_batch_size": 8,
        "loader": {"num_workers": 0},
        **fields.pop("train", {}),
    }
    rest = {name: fields.pop(name) for name in ("checkpoint", "optimizer") if name in fields}
    spec = {
        "name": "own",
        "code": {"archive": stored.digest, "task": entry, **fields},
        "train": train_spec,
        **rest,
    }
    return one_rank(
        RunSpec.model_validate(spec),
        RunDir(storage, "run_own"),
        submission=submission,
        attempt=submission,
    )


def failure(ctx: WorkerContext) -> RankError:
    with pytest.raises(StepFailed) as caught:
        train(ctx)
    error = describe_error(caught.value, 0)
    assert error.kind is ErrorKind.USER, error.traceback
    return error


def changed(old: str, new: str) -> str:
    assert old in TASK
    return TASK.replace(old, new)


LOSS = 'return F.mse_loss(model(x), y, reduction="sum"), len(x)'
