"""Examples of loops with people's own libraries: a rank is killed, no step is lost, and every loss
and weight is that of a twin that nobody killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.gallery import Killed, run_example

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"


@pytest.mark.parametrize(
    ("name", "killed"),
    [
        ("accelerate_loop", Killed(1, 14, "before")),
        ("hf_trainer", Killed(1, 14, "before")),
        ("lightning_module", Killed(1, 14, "before")),
    ],
)
def test_an_example_loses_no_step(name: str, killed: Killed, tmp_path: Path) -> None:
    whole, broken = run_example(GALLERY / f"{name}.py", tmp_path, killed)
    assert [each["source"] for each in broken.restored] == ["fresh", "snapshot"]
    assert broken.restored[1]["step"] in (killed.update - 1, killed.update)
    assert broken.losses.keys() == whole.losses.keys() == set(range(1, whole.step + 1))
    assert broken.losses == whole.losses
    assert broken.step == whole.step
    assert broken.weights.keys() == whole.weights.keys()
    for weight, value in whole.weights.items():
        assert torch.equal(broken.weights[weight], value), weight
