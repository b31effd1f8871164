"""Programs that tests run and .venv has not; scripts/get-test-tools.sh gets them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "out" / "tools"


def tool(name: str) -> Path:
    """Return the directory of a tool; skip the test if it is not there."""
    found = TOOLS / name
    if name == "typescript" and shutil.which("npm") is None:
        pytest.skip("npm is not installed; install it, then run scripts/get-test-tools.sh")
    if not (found / "pins").exists():
        pytest.skip(f"{found} is missing; scripts/get-test-tools.sh could not get it")
    return found
