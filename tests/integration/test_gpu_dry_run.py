"""The parts of ``make gpu`` on a CPU: the same code over gloo, with small sizes. A GPU that is lent
for ten minutes is not to be spent on typing errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import __main__ as ten_minutes
from tests.gpu.verdict import Shown, Word, verdict_of

LONG = {
    "sharded",
    "nccl_abort",
    "speed",
    "determinism",
    "survivors",
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


def test_a_part_that_breaks_or_stalls_fails_and_the_next_one_runs(
    capsys: pytest.CaptureFixture[str], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"missing": 60.0, "memory_of_a_dead": 0.1, "visible_devices": 0.1}
    monkeypatch.setattr(ten_minutes, "LIMITS_S", limits)
    assert ten_minutes.main(["--device", "cpu"]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("FAIL    missing") and "No module named" in first
    assert first.endswith(f"see {output / 'missing.log'}")
    assert second.startswith("FAIL    memory_of_a_dead") and "did not end within 0 s" in second
    assert third.startswith("FAIL    visible_devices")
    verdicts = json.loads((output / "verdicts.json").read_text())
    assert [each["word"] for each in verdicts] == ["FAIL"] * 3


def test_only_a_gpu_passes(tmp_path: Path) -> None:
    shown = Shown("weights equal", "NCCL")
    shown.write(tmp_path / "shown.json")
    assert Shown.read(tmp_path / "shown.json") == shown
    on_cpu, on_gpu = (verdict_of("a", device, 1.0, shown) for device in ("cpu", "cuda"))
    assert (on_cpu.word, on_gpu.word) == (Word.DRY_RUN, Word.PASS)
    assert on_cpu.line == "DRY RUN a                cpu    1.0 s  weights equal; not run: NCCL"
