"""`make test` and `make test-rest` run every test, and none of the costly ones twice."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def commands(target: str, tests: str) -> list[str]:
    """Return the lines of a target of the Makefile that run these tests."""
    makefile = (REPOSITORY / "Makefile").read_text()
    recipe = re.split(rf"^{target}:.*\n", makefile, flags=re.M)[1].split("\n\n")[0]
    return [line for line in recipe.splitlines() if f"$(PYTEST) {tests} " in line]


def takes(command: str, **marks: bool) -> bool:
    """Whether a command of pytest runs a test with these marks."""
    expression = re.search(r'-m "([^"]+)"', command)
    assert expression is not None, command
    return bool(eval(expression[1], {}, dict(marks)))


def test_make_test_and_the_rest_run_every_integration_test_once() -> None:
    tests = "tests/integration tests/chaos"
    lines = commands("test", tests) + commands("test-rest", tests)
    assert ["$(TWO_GROUPS)" in line for line in lines] == [True, True, False]
    for core, chaos, gpu, is_alone in itertools.product([False, True], repeat=4):
        if core and (chaos or gpu or is_alone):
            continue  # refused by check_marks
        marks = {"core": core, "chaos": chaos, "gpu": gpu, "alone": is_alone}
        wanted = not chaos and not gpu
        assert [takes(line, **marks) for line in lines] == [
            core,
            wanted and not core and not is_alone,
            wanted and not core and is_alone,
        ], marks


def test_make_test_and_the_rest_run_every_unit_test() -> None:
    """Tests of properties twice: with few examples, then with all."""
    [quick], [rest] = commands("test", "tests/unit"), commands("test-rest", "tests/unit")
    assert "--hypothesis-profile quick" in quick and "profile" not in rest
    for slow, chaos, hypothesis in itertools.product([False, True], repeat=3):
        marks = {"slow": slow, "chaos": chaos, "hypothesis": hypothesis}
        assert takes(quick, **marks) is (not slow and not chaos), marks
        assert takes(rest, **marks) is ((slow or hypothesis) and not chaos), marks
