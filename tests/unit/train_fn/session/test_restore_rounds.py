"""Killed at random moments, damaged now and then, taken over now and then: every restore is of the
newest sound checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.storage_places import quick_directory

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [6, pytest.param(200, marks=pytest.mark.chaos)])
def test_crashes_and_restores(rounds: int) -> None:
    with quick_directory() as directory:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.restore_rounds", directory, str(rounds), "1"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=500,
        )
    assert done.returncode == 0, done.stderr
    began = json.loads(done.stdout)
    assert len(began) == rounds and began[0] == 0
    assert began[-1] > 0 and len(set(began)) > rounds // 4, "most rounds lived to save"
