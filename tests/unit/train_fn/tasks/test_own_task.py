"""Uploaded tasks on a rank: kept on the node, trained by the loop, and every fault told with the
file and line it lies in."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep.code.pack import pack
from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from everstep.wire.events import EventKind
from service.submission_rules import user_code as code_look
from storage.code.store import CodeStore
from storage.errors import StorageNotFound
from storage.filesystem import Storage, open_storage
from storage.run_dir import RunDir
from tests.support.code_archives import TASK, tar_gz
from tests.support.one_rank import journal_of, one_rank
from train_fn.context import WorkerContext
from train_fn.errors import BadTask
from train_fn.loop.attempt import train
from train_fn.node.node_dir import snapshots_dir
from train_fn.recovery.rank_error import RankError, StepFailed, describe_error
from train_fn.tasks import own
from train_fn.user_code import modules as own_code
from train_fn.user_code.modules import add_to_path, load_named

pytestmark = pytest.mark.own_process

EXAMPLES = Path(__file__).parents[4] / "examples"


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


# ---------------------------------------------------------------- on a node


def test_an_archive_is_unpacked_once_a_node_and_made_whole_again(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = (
        CodeStore(storage)
        .put(tar_gz({"mine/task.py": "x = 1", "mine/data.json": "[1]", "src/inner.py": ""}))
        .digest
    )
    fetched = []
    read = CodeStore.read
    monkeypatch.setattr(
        CodeStore, "read", lambda self, name: fetched.append(name) or read(self, name)
    )
    ranks = [threading.Thread(target=add_to_path, args=(storage, digest)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert fetched == [digest]
    [directory] = {
        Path(place)
        for place in sys.path
        if re.search(r"/cache/code/[0-9a-f]{64}$", place.rstrip("/"))
    }
    assert json.loads((directory / "mine" / "data.json").read_text()) == [1]
    (directory / "mine" / "data.json").unlink()
    add_to_path(storage, digest)
    assert fetched == [digest, digest] and (directory / "mine" / "data.json").exists()
    assert load_named("mine.task:x") == 1 and load_named("inner:__name__") == "inner"
    ours = [place for place in sys.path if "/cache/code/" in place]
    assert len(ours) == len(set(ours))
    assert not list(directory.parent.glob("*.tmp"))


def test_an_archive_that_is_gone_is_the_storage_s_fault(storage: Storage) -> None:
    with pytest.raises(StorageNotFound):
        add_to_path(storage, "sha256:" + "0" * 64)


def test_a_name_that_another_module_has_on_this_node_is_told(storage: Storage) -> None:
    add_to_path(storage, CodeStore(storage).put(tar_gz({"pytest/__init__.py": "Task = 1"})).digest)
    with pytest.raises(BadTask, match=r"'pytest' is taken on this node by .*; rename your module"):
        load_named("pytest:Task")


@pytest.mark.parametrize(
    ("source", "entry", "words"),
    [
        (
            "import nothing_like_it",
            "task:Line",
            r"task cannot be imported: ModuleNotFoundError.*\(task\.py, line 1\)",
        ),
        (
            "x = 1\n\ny = 1 / 0\n",
            "task:Line",
            r"task cannot be imported: ZeroDivisionError.*\(task\.py, line 3\)",
        ),
        ("def f(:\n", "task:Line", r"task cannot be imported: SyntaxError: .*task\.py, line 1"),
        (
            "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', "
            "required=True)\nparser.parse_args()",
            "task:Line",
            (
                r"task cannot be imported: it called sys\.exit\(2\) \(task\.py, line "
                r"4\)\. Move code that parses arg"
            ),
        ),
        (TASK, "task:Lime", r"^task\.py has no 'Lime'; did you mean 'Line'\?$"),
    ],
)
def test_code_that_does_not_import(storage: Storage, source: str, entry: str, words: str) -> None:
    add_to_path(storage, CodeStore(storage).put(tar_gz({"task.py": source})).digest)
    with pytest.raises(BadTask, match=words):
        load_named(entry)


# ---------------------------------------------------------------- trained


def test_the_example_trains_and_is_twenty_lines(storage: Storage) -> None:
    lines = (EXAMPLES / "own_task" / "task.py").read_text().split('"""')[2].splitlines()
    assert len([line for line in lines if line.strip()]) <= 20
    ctx = context(
        storage,
        pack(EXAMPLES / "own_task"),
        "task:DigitsTask",
        args={"width": 16},
        train={"global_batch_size": 500, "micro_batch_size": 250},
    )
    assert train(ctx) is None
    journal = journal_of(ctx)
    [evaluated] = journal.of_kind(EventKind.EVALUATED)
    assert set(evaluated["metrics"]) == {"val_loss", "val_accuracy"}
    [epoch] = journal.of_kind(EventKind.EPOCH_COMPLETED)
    assert (epoch["samples"], epoch["used_once"]) == (1500, 1500)
    assert [manifest.step for manifest in ctx.checkpoints.list()] == [3]


OPTIONAL = """
    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.5)

    def collate(self, samples):
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    def on_epoch_end(self, model, epoch, metrics):
        print("epoch", epoch, sorted(metrics), torch.is_grad_enabled())
"""


@pytest.mark.parametrize("dropout", [0.0, 0.2, None])
def test_passes_are_seeded_where_they_may_draw(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropout: float | None
) -> None:
    """Everstep's own models draw in every pass or in none; of a user's (None) nobody knows what it
    does at a later step."""
    seeded: list[int] = []
    monkeypatch.setattr(
        "train_fn.loop.replica.seed_micro_batch",
        lambda seed, step, *rest, torch_alone: seeded.append(step),
    )
    if dropout is None:
        ctx = context(storage, TASK, train={"max_steps": 3})
    else:
        model = {"name": "mini_resnet", "args": {"width": 4, "num_stages": 1, "dropout": dropout}}
        task = {"name": "image_classification", "model": model, "data": {"name": "digits"}}
        train_spec = {"global_batch_size": 16, "micro_batch_size": 16, "max_steps": 3}
        spec = RunSpec.model_validate({"name": "own", "task": task, "train": train_spec})
        ctx = one_rank(spec, RunDir(storage, "run_own"))
    with torch.random.fork_rng():
        assert train(ctx) is None
    assert set(seeded) == ({0} if dropout == 0 else {0, 1, 2}) and (len(seeded) == 1) == (
        dropout == 0
    )


def test_what_a_task_may_have_is_used(storage: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    ctx = context(storage, TASK + OPTIONAL, train={"epochs": 2})
    assert train(ctx) is None
    assert capsys.readouterr().out.splitlines() == [f"epoch {n} ['val_loss'] False" for n in (0, 1)]
    assert {point["values"]["lr"] for point in journal_of(ctx).points} == {0.5}


def test_a_data_set_that_does_not_pickle_trains_in_loader_workers(storage: Storage) -> None:
    source = TASK.replace("self.x = torch", "self.open = lambda: None; self.x = torch")
    assert train(context(storage, source, train={"loader": {"num_workers": 1}})) is None


# ---------------------------------------------------------------- faults


def changed(old: str, new: str) -> str:
    assert old in TASK
    return TASK.replace(old, new)


LOSS = 'return F.mse_loss(model(x), y, reduction="sum"), len(x)'


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            changed("def loss", "def lose"),
            r"task:Line \(task\.py, line 18\) has no method loss; a task needs build_model",
        ),
        (
            changed("return nn.Linear(1, 1)", "return 3"),
            r"Line\.build_model \(task\.py, line 22\) must return a torch\.nn\.Module, not a int",
        ),
        (
            changed("return nn.Linear(1, 1)", "return nn.Linear(1, 1).requires_grad_(False)"),
            r"line 22\) returned a model of which no parameter requires a gradient",
        ),
        (
            changed('{"train": Points(self.length), "val": Points(8)}', "Points(3)"),
            r'line 25\) must return \{"train"',
        ),
        (changed('"val": Points(8)', '"test": Points(8)'), r"returned test beside train and val"),
        (
            changed("Points(self.length)", "iter([1])"),
            r"line 25\): train is a list_iterator, which is used up after one pass",
        ),
        (
            changed(
                "Points(self.length)", 'type("Stream", (), {"__iter__": lambda self: iter([])})()'
            ),
            r"line 25\): train \(a Stream\) is iterable and has no __len__; set train\.max_steps",
        ),
        (
            changed(
                "Points(self.length)",
                (
                    'type("Stream", (), {"__iter__": lambda s: iter([]), "state_dict": lambda s: '
                    "{}})()"
                ),
            ),
            r"train \(a Stream\) has no load_state_dict",
        ),
        (changed("Points(self.length)", "3"), r"train \(a int\) has no __len__ and no __getitem__"),
        (
            changed("Points(self.length)", "Points(0)"),
            r"Line\.build_datasets \(task\.py, line 25\) returned a train set of length 0",
        ),
        (
            changed(LOSS, "return F.mse_loss(model(x), y)"),
            r"Line\.loss \(task\.py, line 28\) must return \(loss_sum, weight\), not a 0-d tensor",
        ),
        (
            changed(LOSS, 'return F.mse_loss(model(x), y, reduction="none"), len(x)'),
            r"line 28\) must return \(0-d tensor, weight\), not .*shape \(8, 1\)",
        ),
        (changed(LOSS, "return model(x).sum(), None"), r"returned the weight None; it is a number"),
        (
            changed(LOSS, "return model(x).sum().detach(), 8"),
            r"the loss moves no parameter: Line\.loss \(task\.py, line 28\).*\.detach\(\)",
        ),
        (
            changed(LOSS, "return nn.Linear(1, 1)(x).sum(), 8"),
            r"the loss moves no parameter: .* does not use the model",
        ),
        (
            changed(LOSS, "return model(x).sum() * float('nan'), 8"),
            r"the loss of step 1 is nan on rank 0.* from Line\.loss \(task\.py, line 28\)",
        ),
        (
            changed(LOSS, "return model(x).sum(), torch.tensor(float('nan'))"),
            (
                r"Line\.loss \(task\.py, line 28\): the weights of step 1 add up to nan; a weight "
                r"is "
                r"how many samples"
            ),
        ),
        (
            changed(LOSS, "return model(x).sum(), 0"),
            r"line 28\): the weights of step 1 add up to 0\.0",
        ),
        (
            changed(LOSS, "return (model(x) * 0).abs().sum().sqrt(), 8"),
            (
                r"the gradient norm of step 1 is nan on all ranks; the step was not taken.* from "
                r"Line\.loss \(task\.py, line 28\)"
            ),
        ),
        (changed(LOSS, "raise KeyError('y')"), r"^'y' \(task\.py, line 30\)$"),
        (
            changed("return self.x[index : index + 1], ", "raise LookupError(index); "),
            r"\(task\.py, line 15\)$",
        ),
        (
            TASK
            + (
                "\n    def build_optimizer(self, model):\n        return "
                "torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)\n"
            ),
            (
                r"Line\.build_optimizer \(task\.py, line 32\) returned an optimizer that holds no "
                r"parameter"
            ),
        ),
        (
            TASK
            + (
                "\n    def build_optimizer(self, model):\n        return "
                "torch.optim.LBFGS(model.parameters())\n"
            ),
            (
                r"Line\.build_optimizer \(task\.py, line 32\) returned a LBFGS, whose step needs a "
                r"closure .*: use SGD, Adam"
            ),
        ),
        (
            changed("return nn.Linear(1, 1)", "raise SystemExit(3)"),
            r"called sys\.exit\(3\); .*\(task\.py, line 23\)$",
        ),
        (
            changed(LOSS, "import sys; sys.exit('bye')"),
            r"called sys\.exit\('bye'\); .*\(task\.py, line 30\)$",
        ),
        (
            changed(
                "self.length = length", "self.length = ARGUMENTS.parse_args(['--wrong'])"
            ).replace(
                "import torch\n",
                "import argparse, torch\nARGUMENTS = argparse.ArgumentParser()\n",
                1,
            ),
            (
                r"task:Line cannot be made: it called sys\.exit\(2\) \(task\.py, "
                r"line "
                r"21, in __init__\)"
            ),
        ),
        (
            TASK + "\n    def build_optimizer(self, model):\n        return None\n",
            r"must return a torch\.optim\.Optimizer, not None",
        ),
        (
            TASK + "\n    def metrics(self, model, batch):\n        return 3\n",
            r"Line\.metrics \(task\.py, line 32\) must return a dict",
        ),
    ],
)
def test_a_fault_names_file_and_line(storage: Storage, source: str, words: str) -> None:
    error = failure(context(storage, source, train={"grad_clip_norm": 1.0}))
    assert re.search(words, error.message, re.DOTALL), error.message


FULL = """        with open("/dev/full", "w") as cache:
            cache.write("a batch")
"""


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_disk_that_a_task_fills_is_the_user_s_fault_and_named(
    storage: Storage, num_workers: int
) -> None:
    in_loss = changed("        x, y = batch\n", f"{FULL}        x, y = batch\n")
    in_data = changed("        return self.x[index", f"{FULL}        return self.x[index")
    source, loader = (in_data, {"num_workers": 1}) if num_workers else (in_loss, {"num_workers": 0})
    error = failure(context(storage, source, train={"loader": loader}))
    assert "No space left on device" in error.message and "the disk is full. Free" in error.message
    assert re.search(r"task.py, line \d+", error.message)
    assert num_workers or "'/dev/full'" in error.message


def test_a_fault_in_a_loader_worker_names_file_and_line(storage: Storage) -> None:
    source = changed("return self.x[index : index + 1], ", "raise LookupError(index); ")
    error = failure(context(storage, source, train={"loader": {"num_workers": 1}}))
    assert error.type == "LookupError" and "task.py, line 15" in error.summary


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_set_that_ends_its_process_is_no_lost_loader(
    storage: Storage, num_workers: int
) -> None:
    source = changed("return self.x[index : index + 1], ", "raise SystemExit(4); ")
    error = failure(context(storage, source, train={"loader": {"num_workers": num_workers}}))
    assert re.search(
        r"sample \d+ cannot be read: it called sys\.exit\(4\) \(task\.py, line 15, "
        r"in __getitem__\)",
        error.message,
    )


def test_what_parses_arguments_at_import_reads_none_of_the_rank_s_process(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["default_worker.py", "--node-ip-address=10.0.0.1", "--lr=7"])
    parse = (
        "import argparse, sys\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, "
        "default=0.5)\nA = p.parse_args()\n"
    )
    source = parse + changed(
        "return nn.Linear(1, 1)",
        "print('read', A.lr, p.prog, *sys.argv[1:]); return nn.Linear(1, 1)",
    )
    assert train(context(storage, source, train={"max_steps": 1})) is None
    assert "read 0.5 task.py\n" in capsys.readouterr().out


def test_arguments_that_do_not_fit(storage: Storage) -> None:
    error = failure(context(storage, TASK, args={"lenght": 3}))
    assert error.type == "BadTask"
    assert (
        "task:Line (task.py, line 18) cannot be made with code.args {'lenght': 3}" in error.message
    )


def test_a_data_set_of_another_length_after_a_restart_is_refused(storage: Storage) -> None:
    assert train(context(storage, TASK, args={"length": 40})) is None
    error = failure(context(storage, TASK, submission=2, args={"length": 41}))
    assert error.type == "DataChanged"
    assert (
        "training data of Line.build_datasets (task.py, line 25) changed since step"
        in error.message
    )
    assert "it was Points/40, now it is Points/41" in error.message


FROM_FILE = changed(
    "torch.linspace(-1, 1, length)", "torch.tensor(json.loads(pathlib.Path('POINTS').read_text()))"
).replace("import torch\n", "import json, pathlib, torch\n", 1)


def test_data_that_changed_under_one_length_is_refused_and_what_changed_is_named(
    storage: Storage, tmp_path: Path
) -> None:
    points = [0.1 * number for number in range(40)]
    file, source = (
        tmp_path / "points.json",
        FROM_FILE.replace("POINTS", str(tmp_path / "points.json")),
    )
    file.write_text(json.dumps(points))
    source = source.replace("Points(8)", "None")
    assert train(context(storage, source, train={"max_steps": 2})) is None
    file.write_text(json.dumps([*points[:39], 7.0]))
    error = failure(context(storage, source, submission=2, train={"max_steps": 3}))
    assert error.type == "DataChanged"
    assert (
        "(task.py, line 25) changed since step 2: not the same: train sample 39. Put the data back"
        in error.message
    )
    file.write_text(json.dumps(points))
    ctx = context(storage, source, submission=3, train={"max_steps": 3})
    assert train(ctx) is None and [
        data["source"] for data in journal_of(ctx).of_kind(EventKind.RESTORED)
    ] == ["checkpoint"]
    assert {point["step"] for point in journal_of(ctx).points} == {1, 2, 3}


def test_a_state_of_an_everstep_that_kept_no_samples_resumes(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train_fn.state.contents.Contents.dump", lambda self: None)
        assert train(context(storage, TASK, train={"max_steps": 2})) is None
    ctx = context(storage, TASK, submission=2, train={"max_steps": 3})
    assert train(ctx) is None and [
        data["source"] for data in journal_of(ctx).of_kind(EventKind.RESTORED)
    ] == ["checkpoint"]
    assert {point["step"] for point in journal_of(ctx).points} == {1, 2, 3}


def test_what_is_built_draws_what_a_plain_seed_gives_every_attempt_alike(storage: Storage) -> None:
    """The task, its data and its optimizer each draw from seeds of their own: a second attempt in
    this process draws the same."""
    source = changed(
        "self.length = length", "self.length = length; self.drawn = random.random()"
    ).replace("import torch\n", "import random\nimport numpy as np\nimport torch\n", 1)
    source = source.replace(
        'return {"train"',
        (
            "print('drew', self.drawn, np.random.rand(), float(torch.rand(())), "
            "random.random())\n    "
            '    return {"train"'
        ),
    )
    drawn = []
    for submission in (1, 2):
        random.seed()
        np.random.seed()
        torch.seed()
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert (
                train(
                    context(storage, source, submission=submission, train={"max_steps": submission})
                )
                is None
            )
        drawn.append([line for line in out.getvalue().splitlines() if line.startswith("drew")])
    assert drawn[0] == drawn[1] and len(drawn[0]) == 1


def test_the_best_by_a_loss_is_the_smallest_without_a_mode(storage: Storage) -> None:
    """The rate is far too large: each epoch ends worse than the one before it, and the first one's
    checkpoint is kept."""
    ctx = context(
        storage,
        TASK,
        optimizer={"name": "sgd", "lr": 5.0},
        train={"epochs": 3},
        checkpoint={"best_metric": "loss", "keep_latest": 1, "every_steps": 1},
    )
    assert train(ctx) is None
    losses = {
        data["step"]: data["metrics"]["val_loss"]
        for data in journal_of(ctx).of_kind(EventKind.EVALUATED)
    }
    assert losses[3] < losses[6] < losses[9]
    assert {manifest.step for manifest in ctx.checkpoints.list()} == {3, 9}


def test_a_length_that_changes_under_one_fingerprint_is_refused(storage: Storage) -> None:
    source = changed("def __len__", 'fingerprint = "points"\n\n    def __len__')
    assert train(context(storage, source, args={"length": 40})) is None
    error = failure(
        context(storage, source, submission=2, args={"length": 70}, train={"epochs": 2})
    )
    assert (
        "has another length since step 3, though it calls itself points as before" in error.message
    )


def test_the_same_fault_twice_has_one_signature(storage: Storage) -> None:
    source = changed(LOSS, "raise ValueError(f'at {id(batch)}')")
    first, second = (failure(context(storage, source)) for _ in range(2))
    assert first.signature == second.signature and first.step is second.step is None, (
        "nothing was restored yet"
    )


def test_the_look_at_submission_asks_for_the_same_methods() -> None:
    assert tuple(code_look.REQUIRED_METHODS) == own.REQUIRED_METHODS


def test_built_in_code_has_its_place_too() -> None:
    assert re.fullmatch(r" \(.*modules\.py, line \d+\)", own_code.place_of(own_code.add_to_path))
    assert own_code.place_of(print) == "" and own_code.place_of(None) == ""


HEAD_ONLY = """
    def build_optimizer(self, model):
        return torch.optim.AdamW(model[1].parameters(), lr=0.1)
"""
BACKBONE = changed(
    "return nn.Linear(1, 1)", "return nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))"
)


def test_gradients_of_what_the_optimizer_does_not_hold_neither_add_up_nor_count(
    storage: Storage, tmp_path: Path
) -> None:
    """Else the norm that gradients are clipped to would grow from step to step, and a restart would
    change the result."""
    look = "assert all(p.grad is None for p in model[0].parameters()); " + LOSS
    source = BACKBONE.replace(LOSS, look) + HEAD_ONLY
    clipped = {"max_steps": 4, "grad_clip_norm": 0.5, "micro_batch_size": 16}
    ctx = context(storage, source, train=clipped)
    assert train(ctx) is None
    frozen = BACKBONE.replace("return nn.Seq", "model = nn.Seq").replace(
        "nn.Linear(4, 1))", "nn.Linear(4, 1)); model[0].requires_grad_(False); return model"
    )
    other = context(open_storage(str(tmp_path / "other")), frozen + HEAD_ONLY, train=clipped)
    assert train(other) is None
    norms, alone = (
        [point["values"]["grad_norm"] for point in journal_of(each).points] for each in (ctx, other)
    )
    assert norms == alone and len(norms) == 3


def test_an_optimizer_with_parameters_that_are_not_the_model_s_is_refused(storage: Storage) -> None:
    own = """
    def build_optimizer(self, model):
        return torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(3))])
"""
    assert (
        "holds 1 parameters which are not the model's"
        in failure(context(storage, TASK + own)).message
    )
