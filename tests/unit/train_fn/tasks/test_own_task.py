"""Uploaded tasks on a rank: kept on the node, found by their names, and trained by the loop."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import pytest
import torch

from everstep.code import pack
from everstep.wire.events import EventKind
from service.submission_rules import user_code
from storage.code import CodeStore
from storage.errors import StorageNotFound
from storage.filesystem import Storage, open_storage
from tests.support.code_archives import TASK, tar_gz
from tests.support.one_rank import journal_of
from tests.support.own_task import LOSS, changed, context, own_node, storage
from train_fn.errors import BadTask
from train_fn.loop.attempt import train
from train_fn.tasks import builtin
from train_fn.user_code import modules as own_code
from train_fn.user_code.modules import add_to_path, load_named

__all__ = ["own_node", "storage"]


pytestmark = pytest.mark.own_process


EXAMPLES = Path(__file__).parents[4] / "examples"


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


def test_what_a_task_may_have_is_used(storage: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    ctx = context(storage, TASK + OPTIONAL, train={"epochs": 2})
    assert train(ctx) is None
    assert capsys.readouterr().out.splitlines() == [f"epoch {n} ['val_loss'] False" for n in (0, 1)]
    assert {point["values"]["lr"] for point in journal_of(ctx).points} == {0.5}


def test_steps_decide_over_epochs(storage: Storage) -> None:
    for max_steps, expected in ((1, 1), (None, 3), (7, 7)):
        ctx = context(storage, TASK, submission=expected, train={"max_steps": max_steps})
        train(ctx)
        assert journal_of(ctx).points[-1]["step"] == expected


def test_the_number_of_threads_is_the_spec_s_whatever_a_build_sets(storage: Storage) -> None:
    """Another attempt begins with what was built, and sets none."""
    sets = changed(
        "def build_model(self):", "def build_model(self):\n        torch.set_num_threads(3)"
    )
    train(context(storage, sets))
    assert torch.get_num_threads() == 1


def test_a_data_set_that_does_not_pickle_trains_in_loader_workers(storage: Storage) -> None:
    source = TASK.replace("self.x = torch", "self.open = lambda: None; self.x = torch")
    assert train(context(storage, source, train={"loader": {"num_workers": 1}})) is None


# ---------------------------------------------------------------- faults


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


def test_the_look_at_submission_asks_for_the_same_methods() -> None:
    assert tuple(user_code.REQUIRED_METHODS) == builtin.REQUIRED_METHODS


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
    assert norms == alone and len(norms) == 4
