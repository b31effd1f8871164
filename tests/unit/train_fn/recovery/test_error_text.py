"""What users are told of an exception: its own first line, its place in their files, and advice
that applies here."""

from __future__ import annotations

import dataclasses
import importlib.util
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from everstep.text import failure as failure_words
from everstep.wire import ErrorKind, Failure, Verdict
from everstep.wire.events import EventKind
from storage.logs.journal import JournalEvent
from train_fn.recovery.decision import Decision
from train_fn.recovery.error_text import plain_message
from train_fn.recovery.evidence import Evidence, RankError, RankReport, StepFailed, describe_error
from train_fn.recovery.outcome import failure_of
from train_fn.recovery.verdict import judge

pytestmark = pytest.mark.own_process

TASK = """
def deep(number):
    raise ValueError(f"größe {number} passt nicht:\\nerwartet\\n  3")

def loss():
    deep(7)

def chained():
    try:
        deep(1)
    except ValueError as exc:
        raise RuntimeError("the batch is broken\\nsee above") from exc

def outside_of_the_task():
    try:
        deep(1)
    except ValueError:
        int("x")

def group():
    raise ExceptionGroup("two things", [LookupError("no sample 3\\nnor 4"), ValueError("other")])

def inner_group():
    raise ExceptionGroup("all", [ExceptionGroup("some", [OSError("gone")])])
"""


@pytest.fixture
def task(tmp_path: Path) -> ModuleType:
    """Code that lies where nodes keep what users uploaded."""
    path = tmp_path / "cache" / "code" / ("0" * 64) / "mein_täsk.py"
    path.parent.mkdir(parents=True)
    path.write_text(TASK)
    return load(path)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("task", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described(raises: Any, *, after_the_loop: bool = True) -> RankError:
    """The rank's account of what ``raises`` raised, as the loop hands it on or as an import
    does."""
    try:
        raises()
    except BaseException as exc:
        error = describe_error(exc, 1)
        if not after_the_loop:
            return error
        left = dataclasses.replace(error, step=3, phase="step", snapshot_step=3)
        return describe_error(pickle.loads(pickle.dumps(StepFailed(left))), 1)
    raise AssertionError("it raised nothing")


def why(error: RankError) -> list[str]:
    """The lines that ``everstep why`` prints of a rank's error."""
    evidence = Evidence(1, 1.0, (RankReport(1, "node", 7, error=error),), 3)
    judgement = judge(evidence)
    failed = failure_of(
        evidence, judgement, Decision(False, "user_errors", "stop"), detect_s=None, world_size=2
    )
    event = JournalEvent(
        kind=EventKind.FAILURE,
        at=1.0,
        submission=1,
        attempt=1,
        data=failed.event_data(),
        source="controller",
        source_n=1,
    )
    fault = Failure.of(event)
    assert fault == failed.model_copy(update={"submission": 1}), "nothing is lost on the way"
    assert fault.verdict is Verdict.USER_ERROR
    return [failure_words.headline(fault), *failure_words.story(fault)]


@pytest.mark.parametrize("after_the_loop", [True, False])
@pytest.mark.parametrize(
    ("function", "cause", "place"),
    [
        (
            "loss",
            "ValueError: größe 7 passt nicht: (mein_täsk.py, line 3)",
            "mein_täsk.py, line 3, in deep",
        ),
        (
            "chained",
            "RuntimeError: the batch is broken (mein_täsk.py, line 12)",
            "mein_täsk.py, line 12, in chained",
        ),
        (
            "outside_of_the_task",
            "ValueError: invalid literal for int() with base 10: 'x' (mein_täsk.py, line 18)",
            "mein_täsk.py, line 18, in outside_of_the_task",
        ),
        (
            "group",
            (
                "ExceptionGroup: two things (2 sub-exceptions); the first: LookupError: no sample "
                "3 "
                "(mein_täsk.py, line 21)"
            ),
            "mein_täsk.py, line 21, in group",
        ),
        (
            "inner_group",
            (
                "ExceptionGroup: all (1 sub-exception); the first: OSError: gone (mein_täsk.py, "
                "line "
                "24)"
            ),
            "mein_täsk.py, line 24, in inner_group",
        ),
    ],
)
def test_why_shows_an_exception_s_first_line_and_the_innermost_line_of_the_user_s(
    task: ModuleType, function: str, cause: str, place: str, after_the_loop: bool
) -> None:
    lines = why(described(getattr(task, function), after_the_loop=after_the_loop))
    assert lines[1:3] == [f"cause: {cause}", f"your code: {place}"]


def test_a_line_that_python_cannot_parse_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "code" / ("0" * 64) / "task.py"
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\ny = (1,\nz = 2 3\n")
    error = described(lambda: load(path), after_the_loop=False)
    assert (
        error.type == "SyntaxError"
        and error.place is not None
        and error.place.startswith("task.py, line ")
    )
    assert why(error)[2] == f"your code: {error.place}"


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise KeyError(f"sample {index}\nis broken")


class BrokenInWords(Broken):
    def __getitem__(self, index: int) -> int:
        raise LookupError(f"sample {index} is broken:\n  bytes 0 to 7")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (BrokenInWords(), "sample 0 is broken:\n  bytes 0 to 7"),
        (Broken(), "'sample 0\\nis broken'"),
    ],
)
def test_what_a_loader_process_raised_is_told_as_it_was_raised(
    dataset: Dataset[int], message: str
) -> None:
    error = described(lambda: next(iter(DataLoader(dataset, num_workers=1))))
    assert (error.kind, error.message) == (ErrorKind.USER, message)
    assert why(error)[1] == f"cause: {error.type}: {message.splitlines()[0]}"
    assert "__getitem__" in error.traceback


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.used(x)
        return answer


class Twice(TwoHeads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.unused(x)
        return checkpoint(self.used, x, use_reentrant=True) + checkpoint(
            self.used, x, use_reentrant=True
        )  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "advice", "kept", "foreign"),
    [
        (
            TwoHeads(),
            "set requires_grad=False on them",
            "did not receive grad for rank 0: 2 3",
            "TORCH_DISTRIBUTED_DEBUG",
        ),
        (Twice(), "use_reentrant=False", "Parameter at index", "static_graph"),
    ],
)
@pytest.mark.filterwarnings("default")
def test_advice_of_ddp_that_does_not_apply_gives_way_to_ours(
    alone: None, model: nn.Module, advice: str, kept: str, foreign: str
) -> None:
    wrapped = DistributedDataParallel(model)

    def two_steps() -> None:
        for _ in range(2):
            wrapped(torch.ones(1, 2)).sum().backward()

    error = described(two_steps)
    assert error.kind is ErrorKind.USER and advice in error.message and kept in error.message
    assert foreign in error.traceback, "else this test shows nothing"
    assert not re.search(
        "find_unused_parameters|static_graph|TORCH_DISTRIBUTED_DEBUG", error.message
    )
    assert advice in why(error)[1]


def test_other_messages_stay_but_for_sentences_about_ddp() -> None:
    assert plain_message("a\n  b\nc") == "a\n  b\nc"
    message = "The shapes differ. You may pass find_unused_parameters=True to DDP! Look at layer 3."
    assert plain_message(message) == "The shapes differ. Look at layer 3."


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ValueError: one\ntwo", "ValueError: one"),
        ("my.pkg.Größenfehler: zu groß", "my.pkg.Größenfehler: zu groß"),
        ("AssertionError", "AssertionError"),
        ("RuntimeError:\n  what it is\nmore", "RuntimeError: what it is"),
        (
            'Traceback (most recent call last):\n  File "a", line 1\nValueError: last',
            "ValueError: last",
        ),
        (
            'RayTaskError(ValueError): ray::f()\n  File "a", line 1\nValueError: last\n',
            "ValueError: last",
        ),
        (
            "LookupError: Caught LookupError in DataLoader worker process 0.\nOriginal Traceback "
            "(most recent call last):\n"
            '  File "a", line 1\nLookupError: no sample',
            "LookupError: no sample",
        ),
        ("  \n", ""),
    ],
)
def test_the_line_of_an_exception_s_text(text: str, line: str) -> None:
    assert failure_words.exception_line(text) == line
