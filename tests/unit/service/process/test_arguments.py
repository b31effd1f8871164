"""What `serve` reads from its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.process.serving import settings_of


@pytest.mark.parametrize(
    ("value", "on"),
    [("", False), ("0", False), ("false", False), ("No", False), ("off", False), ("1", True)],
)
def test_a_word_for_no_leaves_drills_off(
    value: str, on: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path))
    monkeypatch.setenv("EVERSTEP_DRILLS", value)
    assert settings_of([]).drills is on
