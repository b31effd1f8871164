"""Examples of loops with people's own libraries: a rank is killed, no step is lost, and every loss
and weight is that of a twin that nobody killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.gallery import Killed, run_example

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"


CHAOS = pytest.mark.chaos
EXAMPLES = [
    pytest.param("accelerate_loop", Killed(1, 14, "before"), 1),
    pytest.param("hf_trainer", Killed(1, 14, "before"), 1),
    pytest.param("lightning_module", Killed(1, 14, "before"), 1),
    pytest.param("accelerate_loop", Killed(0, 20, "after"), 1, marks=CHAOS),
    pytest.param("hf_trainer", Killed(0, 27, "after"), 1, marks=CHAOS),
    pytest.param("lightning_module", Killed(0, 20, "after"), 1, marks=CHAOS),
    pytest.param("hf_peft", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("hf_stream", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("stateful_loader", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("ignite_engine", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("gan", Killed(1, 28, "before"), 2, marks=CHAOS),
    pytest.param("lightning_gan", Killed(1, 27, "after"), 2, marks=CHAOS),
]
"""A script, where a rank of it dies, and its optimizer steps for each step of the run."""


@pytest.mark.parametrize(("name", "killed", "num_updates"), EXAMPLES)
def test_an_example_loses_no_step(
    name: str, killed: Killed, num_updates: int, tmp_path: Path
) -> None:
    whole, broken = run_example(GALLERY / f"{name}.py", tmp_path, killed)
    assert [each["source"] for each in broken.restored] == ["fresh", "snapshot"]
    begun = (killed.update - 1) // num_updates
    assert broken.restored[1]["step"] in (begun, begun + 1)
    assert set(whole.losses) == set(range(1, whole.step + 1))
    if killed.rank == 0:  # of the step that it may have had no time to report, there is rank 1's
        for losses in (whole.losses, broken.losses):
            losses.pop(broken.restored[1]["step"], None)
    assert broken.losses == whole.losses
    assert broken.step == whole.step
    assert broken.weights.keys() == whole.weights.keys()
    for weight, value in whole.weights.items():
        assert torch.equal(broken.weights[weight], value), weight
