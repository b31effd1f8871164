"""Checks are made at their moments, in their order; every one is registered, and every message that
a user may get has its moment on the page."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts.checks_reference import PAGE, messages, row
from train_fn.checks.check import Check, Checks, Moment
from train_fn.errors import BadTask

ROOT = Path(__file__).parents[4]
ROOM = ROOT / "train_fn" / "checks"
REGISTERS = ("train_fn/loop/build.py", "train_fn/loop/replica.py", "train_fn/protect/training.py")


class Noting(Check):
    costs = dict.fromkeys((Moment.EPOCH_HOOK, Moment.LEAVING), "none")

    def __init__(self, name: str, said: list[str]) -> None:
        self._name, self._said = name, said

    def before(self, moment: Moment) -> None:
        self._said.append(f"{self._name} before")

    def after(self, moment: Moment, source: str) -> None:
        self._said.append(f"{self._name} after {source}")


class OfSteps(Noting):
    costs = dict.fromkeys((Moment.STEP,), "none")


def test_checks_are_made_around_code_in_the_order_in_which_they_are_registered() -> None:
    said: list[str] = []
    checks = Checks([Noting("one", said), OfSteps("steps", said), Noting("two", said)])
    with checks.around(Moment.EPOCH_HOOK, "hook"):
        said.append("code")
    assert said == ["one before", "two before", "code", "one after hook", "two after hook"]
    said.clear()
    checks.at(Moment.STEP)
    checks.at(Moment.BUILT)
    assert said == ["steps after "]


def test_code_that_fails_is_not_checked() -> None:
    said: list[str] = []
    with (
        pytest.raises(BadTask, match="of the code"),
        Checks([Noting("one", said)]).around(Moment.LEAVING, "end"),
    ):
        raise BadTask("of the code")
    assert said == ["one before"]


def test_every_check_is_registered_by_a_loop() -> None:
    registered = " ".join((ROOT / path).read_text() for path in REGISTERS)
    nodes = [node for path in ROOM.glob("*.py") for node in ast.parse(path.read_text()).body]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    found = [node.name for node in classes if "Check" in map(ast.unparse, node.bases)]
    assert len(found) >= 9
    assert [name for name in found if f"{name}(" not in registered] == []


def test_every_message_has_a_moment_and_is_on_the_page() -> None:
    found, without = messages()
    assert without == []
    page = PAGE.read_text()
    of_code = [each for each in found if each.moment is not Moment.BUILT]
    assert [each.text for each in of_code if row(each) not in page] == []
    assert {each.moment for each in found} == set(Moment)
    assert len({each.text for each in of_code}) > 120
    assert len(page.split()) < 3_200, "a page that a person reads"
