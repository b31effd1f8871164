"""Refuse calls of a user's function or script that would hang or do nothing in a rank.

A rank holds its share of the cluster while its code runs. A trainer that this code starts would
wait for that share for ever, and processes that it spawns as ranks would wait for each other.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.multiprocessing

from train_fn.errors import BadTask
from train_fn.ray_train.ray_internals import DataParallelTrainer, TrainContext

_TUNE = "ray.tune"
_SUBMIT = "submit the function that it would call: everstep submit --code . --train-fn MODULE:NAME"

NO_DATASETS = (
    "a run has no Ray Data sets, so ray.train.get_dataset_shard has nothing to return. Build the "
    "data set in your function, and divide it by ray.train.torch.prepare_data_loader or es.loader"
)
TUNE_REPORTS = (
    "ray.tune.report reports to nobody here, since no Tuner runs. Call ray.train.report, which "
    "takes the same metrics and a checkpoint; everstep sweep tries values of a spec"
)
TRAINER = (
    "{name}.fit() would wait for ever: the ranks of this run hold what it needs. "
    f"Everstep is the trainer: {_SUBMIT}"
)
TUNER = (
    "{name} would wait for ever: the ranks of this run hold what its trials need. Submit the "
    "function alone (--train-fn MODULE:NAME), and its values by everstep sweep"
)
SPAWNED = (
    "this script starts ranks of its own by torch.multiprocessing.{name}, but Everstep has started "
    "one process for each rank, as torchrun does. Call your function directly, with "
    'int(os.environ["RANK"]) and int(os.environ["WORLD_SIZE"])'
)
NEVER_REPORTS = (
    "no file of the archive names ray.train.report or everstep.train: this function has no steps, "
    "metrics or checkpoints, and begins anew after a failure. Report at least once an epoch"
)


@contextmanager
def refused_calls(*, is_script: bool, uses_tune: bool) -> Iterator[None]:
    """Raise BadTask inside the block where a user's code makes such a call.

    Args:
        is_script: whether the code is a script, whose spawned processes would be ranks.
        uses_tune: whether the code imports Ray Tune, which is not loaded otherwise.
    """
    with ExitStack() as undo:
        _replace(undo, TrainContext, "get_dataset_shard", _refuse(NO_DATASETS))
        _replace(undo, DataParallelTrainer, "fit", _refuse_trainer)
        if is_script:
            for name in ("spawn", "start_processes"):
                _replace(undo, torch.multiprocessing, name, _refuse(SPAWNED.format(name=name)))
        if uses_tune:
            tune = importlib.import_module(_TUNE)
            utils = importlib.import_module(f"{_TUNE}.trainable.trainable_fn_utils")
            for module in (tune, utils):
                _replace(undo, module, "report", _refuse(TUNE_REPORTS))
            _replace(undo, tune, "run", _refuse(TUNER.format(name="ray.tune.run")))
            _replace(undo, tune.Tuner, "fit", _refuse(TUNER.format(name="Tuner.fit")))
        yield


def imports(root: Path, names: Collection[str], module: str) -> bool:
    """Return whether a Python file of an archive imports ``module``, anywhere in it.

    Args:
        root: directory with the archive's files.
        names: their paths in it.
    """
    first = module.partition(".")[0].encode()
    for name in names:
        file = root / name
        if name.endswith(".py") and file.is_file() and first in (source := file.read_bytes()):
            try:
                found = any(_names(node, module) for node in ast.walk(ast.parse(source)))
            except (SyntaxError, ValueError, RecursionError):
                found = module.encode() in source
            if found:
                return True
    return False


def mentions(root: Path, names: Collection[str], word: bytes) -> bool:
    """Return whether a Python file of an archive has ``word`` in it, in any case of letters."""
    files = (root / name for name in names if name.endswith(".py"))
    return any(word in file.read_bytes().lower() for file in files if file.is_file())


def _names(node: ast.AST, module: str) -> bool:
    """Return whether a statement imports ``module`` or a part of it, or a string names it."""
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
        found = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found = [node.value]  # importlib.import_module
    else:
        return False
    return any(name == module or name.startswith(f"{module}.") for name in found)


def _replace(undo: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Set ``owner.name`` until ``undo`` closes."""
    is_own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, new)
    undo.callback(setattr, owner, name, before) if is_own else undo.callback(delattr, owner, name)


def _refuse(message: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise BadTask(message)

    return refuse


def _refuse_trainer(trainer: Any) -> Any:
    raise BadTask(TRAINER.format(name=type(trainer).__name__))
