"""Calls that would hang or do nothing in a rank are refused by name, and what an archive imports is
found wherever it stands."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.multiprocessing

from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from everstep.wire.events import EventKind
from storage.code import CodeStore
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.code_archives import tar_gz
from tests.support.one_rank import journal_of, one_rank
from tests.support.own_task import own_node
from train_fn.context import WorkerContext
from train_fn.ray_train import user_function
from train_fn.ray_train.ray_internals import DataParallelTrainer, TrainContext
from train_fn.ray_train.user_function import refused_calls
from train_fn.recovery.evidence import StepFailed
from train_fn.user_code import function
from train_fn.user_code.function import calls_ray, first_imports
from train_fn.user_code.modules import DOOR, CodeOnNode, imports

__all__ = ["own_node"]

TRAINER = """
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train_fn(config):
    pass


TorchTrainer(train_fn, scaling_config=ScalingConfig(num_workers=2)).fit()
"""
SPAWNS = """
import torch.multiprocessing as mp


def main(rank):
    pass


if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
"""
STARTS = SPAWNS.replace("mp.spawn(main, nprocs=2)", "mp.start_processes(main, nprocs=2)")
TUNES = "from ray import tune\n\n\ntune.report({'loss': 1.0})\n"
RUNS = "from ray import tune\n\n\ntune.run(print)\n"
FITS = "from ray import tune\n\n\ntune.Tuner.fit(object.__new__(tune.Tuner))\n"
INSIDE = """
def train_fn(config):
    import everstep.train as es
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with es.protect(model=model, optimizer=optimizer) as state:
        while state.step_number < 3:
            loss = model(torch.ones(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step(loss=loss)
"""
QUIET = "def train_fn(config):\n    print('trained')\n"


@pytest.fixture(autouse=True)
def ray_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, DOOR, raising=False)
    found = SimpleNamespace(checkpoint=None, report_call_index=0, report=lambda *_: None)
    monkeypatch.setattr(user_function, "get_train_context", lambda: found)


def context(tmp_path: Path, name: str, source: str, **code: Any) -> WorkerContext:
    storage = open_storage(str(tmp_path / "storage"))
    digest = CodeStore(storage).put(tar_gz({f"{name}.py": source})).digest
    entry = code or {"train_fn": f"{name}:train_fn"}
    spec = RunSpec.model_validate({"name": "own", "code": {"archive": digest, **entry}})
    return one_rank(spec, RunDir(storage, "run_own"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (TRAINER, "TorchTrainer.fit() would wait for ever"),
        (SPAWNS, "starts ranks of its own by torch.multiprocessing.spawn"),
        (STARTS, "starts ranks of its own by torch.multiprocessing.start_processes"),
        (TUNES, "Call ray.train.report"),
        (RUNS, "ray.tune.run would wait for ever"),
        (FITS, "Tuner.fit would wait for ever"),
    ],
    ids=["trainer", "spawn", "start", "tune", "run", "fit"],
)
def test_a_script_that_would_hang_or_report_to_nobody_is_told_what_to_do(
    tmp_path: Path, source: str, words: str
) -> None:
    before = DataParallelTrainer.fit, torch.multiprocessing.spawn
    with pytest.raises(StepFailed) as caught:
        user_function.train(context(tmp_path, "starts", source, script="starts.py"))
    assert caught.value.error.kind is ErrorKind.USER
    assert words in caught.value.error.message
    assert (DataParallelTrainer.fit, torch.multiprocessing.spawn) == before


def test_a_shard_of_ray_data_is_refused_by_name() -> None:
    before = TrainContext.get_dataset_shard
    with (
        refused_calls(CodeOnNode(Path(), ())),
        pytest.raises(Exception, match=r"no Ray Data sets.*Set code\.datasets"),
    ):
        TrainContext.get_dataset_shard(object.__new__(TrainContext), None)
    assert TrainContext.get_dataset_shard is before


def test_a_function_that_never_reports_is_warned_of_at_its_start(tmp_path: Path) -> None:
    quiet = context(tmp_path, "quiet", QUIET)
    assert user_function.train(quiet) is None
    [started] = journal_of(quiet).of_kind(EventKind.TRAINING_STARTED)
    assert ["begins anew after a failure" in text for text in started["warnings"]] == [True]
    reports = context(tmp_path, "reports", f"{QUIET}    from ray.train import report\n")
    assert user_function.train(reports) is None
    [started] = journal_of(reports).of_kind(EventKind.TRAINING_STARTED)
    assert "warnings" not in started


def test_a_function_may_import_everstep_where_rays_examples_import(tmp_path: Path) -> None:
    ctx = context(tmp_path, "inside", INSIDE)
    assert user_function.train(ctx) is None
    [restored] = journal_of(ctx).of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("fresh", 0)
    assert [point["step"] for point in journal_of(ctx).points] == [1, 2, 3]


LATE = """
def train_fn(config):
    load = __import__("r" + "ay.train").train
    load.report({"loss": 1.0})
"""


def test_code_that_reports_to_ray_from_nowhere_is_told_where_to_import_it(tmp_path: Path) -> None:
    ctx = context(tmp_path, "late", LATE)
    assert not calls_ray(ctx.run_dir.storage, ctx.spec)
    with pytest.raises(StepFailed, match="write `import ray"):
        function.train(ctx)


@pytest.mark.parametrize(
    ("source", "entry", "found"),
    [
        (INSIDE, {}, False),
        (f"{QUIET}    from ray import train\n", {}, True),
        (TRAINER, {"script": "own.py"}, True),
        (SPAWNS, {"script": "own.py"}, False),
        (QUIET, {"train_fn": "installed.elsewhere:train_fn"}, True),
    ],
)
def test_only_code_that_may_call_ray_keeps_rays_worker(
    tmp_path: Path, source: str, entry: dict[str, str], found: bool
) -> None:
    ctx = context(tmp_path, "own", source, **entry)
    assert calls_ray(ctx.run_dir.storage, ctx.spec) is found


PREFIX = """\"\"\"A script.\"\"\"
from __future__ import annotations

import os, json
from torch.utils import data, tensorboard
"""


@pytest.mark.parametrize(
    ("more", "names", "found"),
    [
        ("", ["train.py"], ["__future__", "os", "json", "torch.utils"]),
        ("\nos.environ['X'] = '1'\nimport csv", ["train.py"], 4),
        ("from .model import Net\nimport csv", ["train.py"], 4),
        ("import model\nimport csv", ["train.py", "scripts/model.py"], 4),
        ("import model.net\nimport csv", ["train.py", "lib/model/net/a.so"], 4),
        ("try:\n    import csv\nexcept ImportError:\n    pass", ["train.py"], 4),
        ("", ["train.py", "json/data.bin"], ["__future__"]),
    ],
)
def test_only_libraries_that_a_file_imports_before_all_else_are_imported_ahead(
    more: str, names: list[str], found: list[str] | int
) -> None:
    modules = [module for module, _ in first_imports((PREFIX + more).encode(), names)]
    assert (len(modules) if isinstance(found, int) else modules) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import everstep.train as es", True),
        ("def f():\n    from everstep import (\n        train as es,\n    )", True),
        ("from everstep.train import hf", True),
        ("import importlib\nes = importlib.import_module('everstep.train')", True),
        ("import everstep", False),
        ("from everstep import Client  # everstep.train is another door", False),
        ("def f(:\n    import everstep.train", True),
    ],
)
def test_the_syntax_tree_says_whether_a_module_is_imported(
    tmp_path: Path, source: str, found: bool
) -> None:
    (tmp_path / "mine.py").write_text(source)
    (tmp_path / "notes.txt").write_text("import everstep.train")
    assert imports(tmp_path, ["mine.py", "notes.txt", "gone.py"], "everstep.train") is found
