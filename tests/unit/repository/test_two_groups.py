"""Tests that share a cluster follow each other in one process, and none shares it unknown."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.two_groups import SHARED, check_marks, keep_pieces_together, piece_of

REPOSITORY = Path(__file__).parents[3]


def item(file: str, *fixtures: str, baseid: str = "tests/integration") -> Any:
    """A collected test, and where the fixtures that it uses are defined."""
    definitions = {name: [SimpleNamespace(baseid=baseid)] for name in fixtures}
    info = SimpleNamespace(name2fixturedefs=definitions)
    return SimpleNamespace(nodeid=f"tests/integration/{file}::test_it", _fixtureinfo=info)


def test_files_that_share_a_cluster_are_one_piece_and_follow_each_other() -> None:
    names = ["test_doctor.py", "test_driver.py", "test_main_job.py", "test_web.py", "test_team.py"]
    items = [item(name) for name in names]
    keep_pieces_together(items)
    assert [piece_of(each.nodeid) for each in items] == [
        "service",
        "service",
        "two_nodes",
        "tests/integration/test_web.py",
        "tests/integration/test_team.py",
    ]


def test_every_file_that_shares_is_there() -> None:
    for names in SHARED.values():
        for name in names:
            assert (REPOSITORY / "tests/integration" / name).is_file(), name


def test_a_file_that_shares_unknown_is_named_with_the_way_out() -> None:
    keep_pieces_together([item("test_main_job.py", "service")])
    own = item("test_web.py", "service", baseid="tests/integration/test_web.py")
    keep_pieces_together([own])
    for shared in SHARED:
        with pytest.raises(pytest.UsageError, match=rf"'test_web.py' to SHARED\['{shared}'\]"):
            keep_pieces_together([item("test_web.py", shared)])


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
            continue  # see the test below
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


@pytest.mark.parametrize(
    ("path", "marks", "refused"),
    [
        ("tests/integration/test_web.py", {"core"}, None),
        ("tests/unit/service/test_api.py", {"slow", "chaos"}, None),
        ("tests/unit/service/test_api.py", {"core"}, "core is for integration tests"),
        ("tests/integration/test_web.py", {"slow"}, "slow is for unit tests"),
        ("tests/integration/test_web.py", {"core", "alone"}, "core and alone"),
        ("tests/integration/test_web.py", {"core", "chaos"}, "core and chaos"),
    ],
)
def test_a_mark_that_no_command_expects_is_refused(
    path: str, marks: set[str], refused: str | None
) -> None:
    marked: Any = SimpleNamespace(
        nodeid=f"{path}::test_it",
        get_closest_marker=lambda name: name if name in marks else None,
    )
    if refused is None:
        check_marks([marked])
        return
    with pytest.raises(pytest.UsageError, match=refused):
        check_marks([marked])
