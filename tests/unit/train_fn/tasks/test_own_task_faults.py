"""Faults of an uploaded task: each is the user's, with the file and line it lies in."""

from __future__ import annotations

import re

import pytest

from storage.filesystem import Storage
from tests.support.code_archives import TASK
from tests.support.own_task import LOSS, changed, context, failure, own_node, storage

__all__ = ["own_node", "storage"]


pytestmark = pytest.mark.own_process


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


def test_arguments_that_do_not_fit(storage: Storage) -> None:
    error = failure(context(storage, TASK, args={"lenght": 3}))
    assert error.type == "BadTask"
    assert (
        "task:Line (task.py, line 18) cannot be made with code.args {'lenght': 3}" in error.message
    )


def test_the_same_fault_twice_has_one_signature(storage: Storage) -> None:
    source = changed(LOSS, "raise ValueError(f'at {id(batch)}')")
    first, second = (failure(context(storage, source)) for _ in range(2))
    assert first.signature == second.signature and first.step is second.step is None, (
        "nothing was restored yet"
    )


def test_an_optimizer_with_parameters_that_are_not_the_model_s_is_refused(storage: Storage) -> None:
    own = """
    def build_optimizer(self, model):
        return torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.zeros(3))])
"""
    assert (
        "holds 1 parameters which are not the model's"
        in failure(context(storage, TASK + own)).message
    )
