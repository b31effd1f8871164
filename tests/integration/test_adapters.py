"""Trainers that do more than train: they evaluate, save, stop early, and count. A rank is killed
while they do, and all of it comes out as in a twin that nobody killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.gallery import Killed, run_with_twin

SCRIPTS = Path(__file__).parent / "adapted"
CHAOS = pytest.mark.chaos
HF, LIGHTNING, FSDP2 = "hf_evaluated", "lightning_evaluated", "fsdp2"


def after(*updates: int) -> list[Killed]:
    """Kill rank 1 right after these optimizer steps: its peer commits them, and fails in the
    evaluation, the save or the hook that follows, or in the next step."""
    return [Killed(1, update, "after") for update in updates]


@pytest.mark.parametrize(
    ("script", "case", "kills"),
    [
        pytest.param(HF, "early", after(12)),
        pytest.param(HF, "stream", after(16), marks=CHAOS),
        pytest.param(LIGHTNING, "early", after(20)),
        pytest.param(HF, "early", after(9), marks=CHAOS),
        pytest.param(HF, "stream", after(20), marks=CHAOS),
        pytest.param(HF, "epochs", after(5, 6, 15), marks=CHAOS),
        pytest.param(LIGHTNING, "early", [*after(30), Killed(1, 21, "before")], marks=CHAOS),
        pytest.param(LIGHTNING, "manual", after(5, 20), marks=CHAOS),
        pytest.param(LIGHTNING, "mid", after(4, 10), marks=CHAOS),
        pytest.param(LIGHTNING, "steps", after(3, 13), marks=CHAOS),
        pytest.param(LIGHTNING, "limit", [*after(6), Killed(1, 8, "before")], marks=CHAOS),
        pytest.param(LIGHTNING, "accumulate", after(10, 22), marks=CHAOS),
        pytest.param(LIGHTNING, "two", [Killed(1, 8, "before")], marks=CHAOS),
        pytest.param(FSDP2, "accelerate", [Killed(1, 7, "node")]),
        pytest.param(FSDP2, "hf", [Killed(1, 7, "node")], marks=CHAOS),
        pytest.param(FSDP2, "lightning", [Killed(1, 7, "node")], marks=CHAOS),
        pytest.param(FSDP2, "accelerate", [*after(20), Killed(0, 9, "node")], marks=CHAOS),
        pytest.param(FSDP2, "hf", [*after(8, 9), Killed(0, 12, "node")], marks=CHAOS),
        pytest.param(FSDP2, "lightning", [*after(10), Killed(0, 11, "node")], marks=CHAOS),
    ],
)
def test_what_a_trainer_does_beside_training_is_that_of_the_twin(
    script: str, case: str, kills: list[Killed], tmp_path: Path
) -> None:
    whole, runs = run_with_twin(SCRIPTS / f"{script}.py", tmp_path, kills, {"CASE": case})
    for killed, broken in zip(kills, runs, strict=True):
        assert [each["source"] for each in broken.restored] == ["fresh", "snapshot"]
        begun = broken.restored[1]["step"]
        # What died with its node had passed no gate, and may not have been sent.
        assert killed.update - 1 - (killed.place == "node") <= begun <= killed.update
        assert broken.told == whole.told, killed
        assert broken.losses == whole.losses, killed
        assert broken.step == whole.step == len(whole.losses)
        for weight, value in whole.weights.items():
            assert torch.equal(broken.weights[weight], value), (killed, weight)
