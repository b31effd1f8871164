"""A test in a process of its own: results come back, and a crash fails that test alone, by name,
with its last words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]

SUITE = """
import os
import pytest

SEEN = []

@pytest.fixture(scope="session")
def server():
    SEEN.append("up")
    yield SEEN
    with open(os.environ["TORN_DOWN"], "a") as file:
        file.write("parent" if os.getpid() == PARENT else "child")

PARENT = os.getpid()

def test_a_fixture_of_the_session(server):
    assert server == ["up"]

@pytest.mark.own_process
def test_passes(server):
    assert os.getpid() != PARENT

@pytest.mark.own_process
def test_fails():
    assert {"a": 1} == {"a": 2}

@pytest.mark.own_process
def test_aborts():
    os.write(2, b"double free or corruption (fasttop)\\n")
    os.abort()

@pytest.mark.own_process
def test_exits():
    os._exit(7)

@pytest.mark.own_process
@pytest.mark.timeout(1)
def test_hangs():
    while True:
        pass

@pytest.mark.own_process
@pytest.mark.parametrize("number", [1, 2])
def test_leaves_nothing(number):
    SEEN.append(number)
    assert SEEN == ["up", number]

def test_is_told_apart(server):
    assert server == ["up"] and os.getpid() == PARENT
"""


def test_results_and_crashes_come_back(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.support.own_process import pytest_runtest_protocol\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = own_process: as in this project\n")
    (tmp_path / "test_suite.py").write_text(SUITE)
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-vv",
            "-p",
            "no:xdist",
            str(tmp_path),
        ],
        cwd=REPOSITORY,
        env=os.environ | {"TORN_DOWN": str(tmp_path / "torn_down")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    shown = ended.stdout
    assert "4 failed, 5 passed" in shown, shown + ended.stderr
    for passed in (
        "test_a_fixture_of_the_session",
        "test_passes",
        "test_leaves_nothing[1]",
        "test_leaves_nothing[2]",
    ):
        assert f"::{passed} PASSED" in shown, shown
    assert "was ended by SIGABRT" in shown and "double free or corruption (fasttop)" in shown, shown
    assert "in test_aborts" in shown, "faulthandler's stack of the crash"
    assert "exited with code 7" in shown and "Timeout" in shown, shown
    assert '{"a": 2}'.replace('"', "'") in shown, "an assertion's own explanation"
    assert (tmp_path / "torn_down").read_text() == "parent", (
        "a child tears down no fixture of the session"
    )
