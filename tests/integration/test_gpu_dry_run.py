"""The parts of ``make gpu`` on a CPU: the same code over gloo, with small sizes. A GPU that is lent
for ten minutes is not to be spent on typing errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import __main__ as ten_minutes
from tests.gpu.verdict import Word

LONG = {
    "sharded",
    "nccl_abort",
    "speed",
    "two_ranks",
    "broken_start",
    "hanging_peers",
    "bits",
    "one_of_two",
    "hand_over",
    "loops",
    "illegal_access",
    "visible_devices",
}
"""Parts that take half a minute or longer."""
PATIENCE_S = 240.0
"""Longest part, where the cores are shared with other tests."""


@pytest.fixture(autouse=True)
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ten_minutes, "OUT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.chaos if name in LONG else ())
        for name in ten_minutes.LIMITS_S
    ],
)
def test_the_cpu_s_share_of_a_part_holds(name: str, output: Path) -> None:
    verdict = ten_minutes.run_part(name, "cpu", PATIENCE_S)
    assert verdict.word is Word.DRY_RUN, (output / f"{name}.log").read_text()[-3000:]
    assert "; not run: " in verdict.text, "a CPU shows nothing of a GPU"
    assert "\n" not in verdict.line


def test_every_part_has_a_place_in_the_order() -> None:
    parts = {path.stem for path in (Path(ten_minutes.__file__).parent / "parts").glob("[a-z]*.py")}
    assert set(ten_minutes.LIMITS_S) == parts
