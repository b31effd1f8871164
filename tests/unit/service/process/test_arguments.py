"""What `serve` reads from its environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.settings import Settings


@pytest.mark.parametrize(
    ("value", "on"),
    [("", False), ("0", False), ("false", False), ("No", False), ("off", False), ("1", True)],
)
def test_a_word_for_no_leaves_drills_off(
    value: str, on: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path))
    monkeypatch.setenv("EVERSTEP_DRILLS", value)
    assert Settings.of_process(os.environ).drills is on
