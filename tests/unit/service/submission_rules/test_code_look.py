"""The look at code before it runs: what is surely wrong is found with file and line, and what may
be right passes."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from everstep.spec.code import CodeSpec
from service.submission_rules import user_code
from service.submission_rules.user_code import faults_of
from tests.support.code_archives import TASK

ARCHIVE = "sha256:" + "0" * 64


def faults(
    files: dict[str, str], task: str | None = "task:Line", train_fn: str | None = None, **args: Any
) -> list[str]:
    code = CodeSpec(archive=ARCHIVE, task=task, train_fn=train_fn, args=args)
    return [
        str(fault)
        for fault in faults_of(code, {path: source.encode() for path, source in files.items()})
    ]


def test_a_task_passes() -> None:
    assert faults({"task.py": TASK}) == []
    assert faults({"task.py": TASK}, length=3) == []


def test_a_module_that_is_not_there_is_named_with_what_is() -> None:
    [fault] = faults({"mine/task.py": TASK}, "mine.tusk:Line")
    assert fault == "code.task: the archive has no module 'mine.tusk'; did you mean mine.task?"
    [fault] = faults({"mine/task.py": TASK}, "q:Line")
    assert "its modules are mine.task" in fault


def test_a_class_that_is_not_there() -> None:
    assert faults({"task.py": TASK}, "task:Lime") == [
        "code.task: task.py has no class 'Lime'; did you mean 'Line'?"
    ]


def test_a_task_that_makes_its_own_steps_needs_no_loss() -> None:
    step = "def training_step(self, model, batch, step, optimizers)"
    assert faults({"task.py": TASK.replace("def loss(self, model, batch)", step)}) == []
    source = TASK.replace("def loss(self, model, batch)", "def training_step(self, model, batch)")
    assert faults({"task.py": source}) == [
        (
            "code.task: task.py, line 28: Line.training_step is called with 4 arguments beside "
            "self; change its parameters to take them"
        )
    ]


def test_a_method_that_is_missing_or_takes_something_else() -> None:
    source = TASK.replace("def loss(self, model, batch)", "def lose(self, model, batch)")
    assert faults({"task.py": source}) == [
        (
            "code.task: task.py, line 18: class Line has no method loss; a task needs build_model, "
            "build_datasets, loss"
        )
    ]
    source = TASK.replace("def loss(self, model, batch)", "def loss(self, batch)")
    assert faults({"task.py": source}) == [
        (
            "code.task: task.py, line 28: Line.loss is called with 2 arguments beside self; "
            "change its parameters to take them"
        )
    ]


@pytest.mark.parametrize(
    ("parameters", "passes"),
    [
        ("model, batch, step, epoch", True),
        ("model, batch, *, epoch", True),
        ("model, batch, rate, step", False),
        ("model, step, batch", False),
        ("model, batch, *, rate", False),
        ("model, batch, step, /", False),
    ],
)
def test_a_loss_may_ask_for_the_step_and_the_epoch(parameters: str, *, passes: bool) -> None:
    source = TASK.replace("def loss(self, model, batch)", f"def loss(self, {parameters})")
    assert (faults({"task.py": source}) == []) is passes


def test_syntax_errors_wherever_the_task_imports_them() -> None:
    files = {
        "mine/__init__.py": "",
        "mine/task.py": f"from .parts import net\n{TASK}",
        "mine/parts/__init__.py": "",
        "bad.py": "x =",
    }
    assert faults(files, "mine.task:Line") == []
    files["mine/parts/net.py"] = "import os\ndef f(:\n    pass\n"
    [fault] = faults(files, "mine.task:Line")
    assert fault.startswith("code.task: mine/parts/net.py, line 2: ")
    [fault] = faults({"task.py": "if True:\nx"})
    assert fault.startswith("code.task: task.py, line 2: ")


def test_bases_and_imports_within_the_archive_are_followed() -> None:
    base = TASK.replace("class Line", "class Base")
    assert (
        faults({"base.py": base, "task.py": "from base import Base\nclass Line(Base):\n    pass\n"})
        == []
    )
    assert faults({"base.py": TASK, "task.py": "from base import Line\n"}) == []
    assert (
        faults(
            {
                "base.py": "class Base: pass",
                "task.py": "from base import Base\nclass Line(Base):\n    pass\n",
            }
        )
        != []
    )


@pytest.mark.parametrize(
    "source",
    [
        "from elsewhere import *",
        "from elsewhere import Line",
        "import elsewhere\nclass Line(elsewhere.Base): pass",
        "Line = make()",
        "def __getattr__(name): ...",
        "@decorated\nclass Line: pass",
        "class Line:\n    build_model = build_datasets = loss = None",
        "try:\n    from a import Line\nexcept ImportError:\n    Line = None",
        "def Line(): ...",
        TASK.replace("def loss(self, model, batch)", "def loss(self, *args)"),
        TASK.replace(
            "    def loss(self, model, batch)", "    @staticmethod\n    def loss(model, batch)"
        ),
        "x = 1\n" * 600_000,
    ],
)
def test_what_cannot_be_known_passes(source: str) -> None:
    assert faults({"task.py": source}) == []


def test_arguments_are_compared_with_what_the_class_takes() -> None:
    assert faults({"task.py": TASK}, lenght=3) == [
        (
            "code.args.lenght: task.py, line 19: Line takes no argument 'lenght'; did you mean "
            "'length'?"
        )
    ]
    source = TASK.replace(
        "length=40):\n        self.length", "length, *, path):\n        self.length"
    )
    assert faults({"task.py": source}, length=3) == [
        "code.args.path: task.py, line 19: Line needs the argument 'path'"
    ]
    assert faults({"task.py": source.replace("*, path", "**rest")}, length=3, other=1) == []


def test_a_train_fn() -> None:
    files = {"train.py": "def train_fn(config):\n    pass\n"}
    assert faults(files, None, "train:train_fn") == []
    assert faults({"train.py": "def train_fn(): ..."}, None, "train:train_fn") == []
    [fault] = faults(files, None, "train:trainfn")
    assert fault == "code.train_fn: train.py has no function 'trainfn'; did you mean 'train_fn'?"
    for source, words in (
        ("def train_fn(a, b): ...", "needs more arguments than it gets"),
        ("async def train_fn(config): ...", "is async"),
        ("class train_fn: ...", "is a class"),
    ):
        [fault] = faults({"train.py": source}, None, "train:train_fn")
        assert "train.py, line 1" in fault and words in fault


@pytest.mark.parametrize(
    "source", ["(" * 5000, "-" * 100_000 + "1", "\x00", "a." * 50_000 + "a", "[" * 150 + "]" * 150]
)
def test_source_that_is_an_attack_on_the_parser_is_at_worst_a_fault(source: str) -> None:
    assert isinstance(faults({"task.py": source}), list)


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[int]:
    calls, real = [0], getattr(module, name)

    def call(*args: Any, **more: Any) -> Any:
        calls[0] += 1
        return real(*args, **more)

    monkeypatch.setattr(module, name, call)
    return calls


def test_a_name_of_very_many_parts_is_followed_no_deeper_than_a_path_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = counted(monkeypatch, user_code, "module_path")
    source = TASK + "\nimport " + ".".join(["a"] * 20_000) + "\n"
    assert faults({"task.py": source}) == []
    assert looked[0] < 200


def test_source_that_takes_long_to_parse_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MiB of source held up every other request for 0.6 s at a time."""
    parsed = []
    real = ast.parse

    def parse(source: bytes, *more: Any) -> ast.AST:
        parsed.append(len(source))
        return real(source, *more)

    monkeypatch.setattr(ast, "parse", parse)
    files = {f"m{n}.py": f"# {'long ' * 12_000}" for n in range(100)} | {"huge.py": "a\n" * 40_000}
    assert (
        faults(
            {
                **files,
                "task.py": TASK + "\nimport huge\n" + "".join(f"import m{n}\n" for n in range(100)),
            }
        )
        == []
    )
    assert max(parsed) <= 64 << 10 and 1 << 18 < sum(parsed) <= 1 << 20


def test_a_script() -> None:
    files = {
        "train.py": "import pkg.parts\n",
        "pkg/__init__.py": "",
        "pkg/parts.py": "def f(:\n",
        "pkg/__main__.py": "",
    }

    def found(script: str, **changes: str) -> list[str]:
        code = CodeSpec(archive=ARCHIVE, script=script)
        sources = {path: text.encode() for path, text in (files | changes).items()}
        return [str(fault) for fault in faults_of(code, sources)]

    mended = {"pkg/parts.py": ""}
    for script in ("train.py", "./train.py", "-m train", "-m pkg", "pkg/parts.py"):
        assert found(script, **mended) == []
    assert found("train.py") == ["code.script: pkg/parts.py, line 1: invalid syntax"]
    assert found("trian.py") == [
        "code.script: the archive has no file 'trian.py'; did you mean train.py?"
    ]
    assert found("-m pkg.tr", **mended)[0].startswith("code.script: the archive has no module")
