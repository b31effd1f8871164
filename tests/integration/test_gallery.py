"""Examples of loops with people's own libraries: a rank is killed, no step is lost, and every loss
and weight is that of a twin that nobody killed."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from everstep.wire.events import EventKind
from tests.integration.own_steps_task import SPEC, weights_of
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_rehearse import rehearse
from tests.support.gallery import Killed, run_example

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
MIGRATED = GALLERY.parent / "migrated"
CHAOS = pytest.mark.chaos
EXAMPLES = [
    pytest.param("accelerate_loop", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("hf_trainer", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("lightning_module", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("gpt_by_path", Killed(1, 14, "before"), 1),
    # not at an epoch's end, where a survivor leaves nothing: rank 0 may have published too long ago
    pytest.param("clip", Killed(0, 25, "after"), 1),
    pytest.param("accelerate_loop", Killed(0, 20, "after"), 1, marks=CHAOS),
    pytest.param("hf_trainer", Killed(0, 27, "after"), 1, marks=CHAOS),
    pytest.param("lightning_module", Killed(0, 20, "after"), 1, marks=CHAOS),
    # in the last step of an epoch, and of the training
    pytest.param("hf_trainer", Killed(1, 18, "before"), 1, marks=CHAOS),
    pytest.param("hf_trainer", Killed(1, 36, "before"), 1, marks=CHAOS),
    pytest.param("lightning_module", Killed(1, 20, "before"), 1, marks=CHAOS),
    pytest.param("lightning_module", Killed(0, 30, "after"), 1, marks=CHAOS),
    pytest.param("accelerate_loop", Killed(1, 30, "before"), 1, marks=CHAOS),
    pytest.param("hf_peft", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("hf_stream", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("stateful_loader", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("ignite_engine", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("webdataset_stream", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("timm_model", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("torchrun_script", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("torchrun_script", Killed(0, 20, "after"), 1, marks=CHAOS),
    pytest.param("gpt_by_path", Killed(0, 40, "after"), 1, marks=CHAOS),
    pytest.param("byol", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("clip", Killed(1, 14, "before"), 1, marks=CHAOS),
    pytest.param("segmentation", Killed(1, 7, "before"), 1, marks=CHAOS),
    pytest.param("gan", Killed(1, 28, "before"), 2, marks=CHAOS),
    pytest.param("lightning_gan", Killed(1, 27, "after"), 2, marks=CHAOS),
]
"""A script, where a rank of it dies, and its optimizer steps for each step of the run."""


@pytest.mark.parametrize(("name", "killed", "num_updates"), EXAMPLES)
def test_an_example_loses_no_step(
    name: str, killed: Killed, num_updates: int, tmp_path: Path
) -> None:
    assert_loses_no_step(GALLERY / f"{name}.py", killed, num_updates, tmp_path)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """What the migrated scripts read, in their working directory."""
    draws = np.random.default_rng(0)
    for part, num in (("train", 8), ("val", 4)):
        for number, name in enumerate(("ape", "bee", "cat")):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            for at in range(num):
                pixels = draws.integers(0, 128, (20, 20, 3), dtype=np.uint8)
                pixels[..., number] += 100
                Image.fromarray(pixels).save(tmp_path / "images" / part / name / f"{at}.png")
    (tmp_path / "words.txt").write_text("a rank dies, and nobody notices. " * 20)
    shutil.copy(MIGRATED / "small_gpt.yaml", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "killed"),
    [
        pytest.param("images", Killed(1, 5, "before"), marks=CHAOS),
        pytest.param("small_gpt", Killed(1, 14, "before")),
        pytest.param("recommender", Killed(1, 8, "before"), marks=CHAOS),
        pytest.param("images", Killed(1, 6, "after"), marks=CHAOS),
        pytest.param("images", Killed(0, 3, "after"), marks=CHAOS),
        pytest.param("small_gpt", Killed(0, 20, "after"), marks=CHAOS),
        pytest.param("recommender", Killed(1, 10, "after"), marks=CHAOS),
        pytest.param("recommender", Killed(0, 13, "before"), marks=CHAOS),
    ],
)
def test_a_migrated_script_loses_no_step(name: str, killed: Killed, inputs: Path) -> None:
    """``after`` the last step of an epoch: its peer has evaluated, and fails in the next one."""
    assert_loses_no_step(MIGRATED / f"{name}.py", killed, 1, inputs)


@pytest.mark.chaos
@pytest.mark.parametrize("name", ["images", "small_gpt", "recommender"])
def test_a_migrated_script_passes_a_rehearsal(name: str, inputs: Path) -> None:
    code = inputs / "code"
    code.mkdir()
    for each in ("images", "words.txt", "small_gpt.yaml"):
        (inputs / each).rename(code / each)
    shutil.copy(MIGRATED / f"{name}.py", code)
    found = rehearse(inputs, "--code", code, "--script", f"{name}.py", "--steps", 10)
    assert found.code == 0, found.report


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["dispatch_batches", "split_batches"])
def test_batches_that_accelerate_shares_out_in_another_way(mode: str, tmp_path: Path) -> None:
    """By default each rank reads its own. Here rank 0 reads for all, or each takes a part."""
    source = (GALLERY / "accelerate_loop.py").read_text()
    config = f"dataloader_config=DataLoaderConfiguration({mode}=True)"
    changed = source.replace("Accelerator(cpu=True", f"Accelerator({config}, cpu=True").replace(
        "import Accelerator", "import Accelerator, DataLoaderConfiguration"
    )
    assert changed.count("DataLoaderConfiguration") == 2
    script = tmp_path / "accelerate_loop.py"
    script.write_text(changed)
    assert_loses_no_step(script, Killed(1, 14, "before"), 1, tmp_path)


def assert_loses_no_step(script: Path, killed: Killed, num_updates: int, directory: Path) -> None:
    whole, broken = run_example(script, directory, killed)
    assert [each["source"] for each in broken.restored] == ["fresh", "snapshot"]
    begun = (killed.update - 1) // num_updates
    assert broken.restored[1]["step"] in (begun, begun + 1), broken.log
    assert set(whole.losses) == set(range(1, whole.step + 1))
    if killed.rank == 0:  # of the step that it may have had no time to report, there is rank 1's
        for losses in (whole.losses, broken.losses):
            losses.pop(broken.restored[1]["step"], None)
    assert broken.losses == whole.losses
    assert broken.step == whole.step
    assert broken.weights.keys() == whole.weights.keys()
    for weight, value in whole.weights.items():
        assert torch.equal(broken.weights[weight], value), weight


@pytest.mark.parametrize(
    "killed", [Killed(1, 14, "before"), pytest.param(Killed(0, 28, "after"), marks=CHAOS)]
)
def test_the_task_with_two_optimizers_loses_no_step(killed: Killed, tmp_path: Path) -> None:
    setup = "tests.integration.own_steps_task:example"
    train = SPEC.train.model_copy(update={"global_batch_size": 40, "max_steps": 20})
    checkpoint = SPEC.checkpoint.model_copy(update={"best_metric": "accuracy"})
    spec = SPEC.model_copy(update={"train": train, "checkpoint": checkpoint})
    whole, broken = make_run_dir(tmp_path, "whole"), make_run_dir(tmp_path, "broken")
    calm = train_to_end(Job(whole, spec, 2, setup=setup), tmp_path)
    death = f"{setup}_killed_{killed.rank}_{killed.update}_{killed.place}"
    left = run_ranks(Job(broken, spec, 2, setup=death), tmp_path)[1 - killed.rank]
    again = train_to_end(Job(broken, spec, 2, attempt=2, setup=setup), tmp_path)
    [restored] = again.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("snapshot", (killed.update - 1) // 2)
    assert again.losses | left.losses == {
        step: calm.losses[step] for step in {*again.losses, *left.losses}
    }
    weights, wanted = weights_of(broken), weights_of(whole)
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], value) for name, value in wanted.items())
