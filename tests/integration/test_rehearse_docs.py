"""A rehearsal of every loop that the documentation shows: the code blocks of its pages, and the
examples that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.test_rehearse import DEADLINE_S, Rehearsed, rehearse

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(DEADLINE_S + 60)]

PREAMBLE = """
import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import everstep.train as es

dist.init_process_group("gloo")
torch.manual_seed(0)
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
x = torch.randn({samples}, 8)
dataset = TensorDataset(x, x[:, :4].argmax(1))
"""
BUILT = """
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
"""
SCHEDULED = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)\n"
LOOP = "A loop of your own"
OWN_LOADER = "A DataLoader of your own"


def block(page: str, heading: str) -> str:
    """Return the first indented block of code below a heading."""
    text = (ROOT / "docs" / page).read_text().partition(f" {heading}\n")[2]
    found = re.search(r"^    .*\n(?:^    .*\n|^\n)*", text, re.MULTILINE)
    assert found is not None, heading
    return "\n".join(line[4:] for line in found[0].splitlines()) + "\n"


def patched(page: str, number: int = 0) -> str:
    """Return the code that a page's diff ends with."""
    text = (ROOT / "docs" / "migrate" / page).read_text()
    diff = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)[number]
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-")) + "\n"


AVERAGE = """
average = torch.optim.swa_utils.AveragedModel(model.module)
def evaluate(network):
    network.eval()
    with torch.no_grad(): network(x)
    network.train()
"""
SAMPLES = "loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))\n"


def shown() -> dict[str, tuple[str, int]]:
    """Return the loops that pages show, each completed to a script, with its number of samples."""
    own_loader = block("own-loop.md", OWN_LOADER).replace(
        "...", "loss = F.cross_entropy(model(inputs), labels)\n" + " " * 8
        + "loss.backward(); optimizer.step(); optimizer.zero_grad()",
    )  # fmt: skip
    return {
        "own-loop, a loop": (BUILT + SCHEDULED + AVERAGE + block("own-loop.md", LOOP), 320),
        "own-loop, a DataLoader": (BUILT + SAMPLES + own_loader, 160),
        "migrate, torchrun": ("model = Net()\n" + patched("torchrun.md"), 320),
        "migrate, Ray Train": (
            "import ray.train, ray.train.torch\n"
            "ray.train.torch.prepare_model = DistributedDataParallel\n"
            "ray.train.torch.prepare_data_loader = lambda loader: loader\n"
            + patched("ray-train.md")
            + 'train_fn({"lr": 3e-3})\n',
            320,
        ),
    }


PAGES = (
    "own-loop, a loop",
    "own-loop, a DataLoader",
    "migrate, torchrun",
    "migrate, Ray Train",
)


@pytest.mark.parametrize("name", PAGES)
def test_a_loop_that_a_page_shows_is_equal(name: str, tmp_path: Path) -> None:
    text, samples = shown()[name]
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text(PREAMBLE.format(samples=samples) + text)
    found = rehearse(tmp_path, "--code", folder, "--script", "train.py")
    assert found.code == 0, found.report
    assert_dies_at_the_end_of_an_epoch(found)


def assert_dies_at_the_end_of_an_epoch(found: Rehearsed) -> None:
    assert any("the end of an epoch" in name for name in found.outcomes if "killed" in name)


GALLERY = sorted(
    path.stem
    for path in (EXAMPLES / "gallery").glob("*.py")
    if "everstep.train" in path.read_text()
)


@pytest.mark.parametrize("name", GALLERY)
def test_an_example_is_equal(name: str, tmp_path: Path) -> None:
    arguments = ("--code", EXAMPLES / "gallery", "--script", f"{name}.py")
    found = rehearse(tmp_path, *arguments, "--max-samples", 100)
    assert found.code == 0, found.report


def test_the_example_of_a_loop_is_equal(tmp_path: Path) -> None:
    arguments = ("--code", EXAMPLES / "own_loop", "--train-fn", "train:train_fn")
    found = rehearse(tmp_path, *arguments, "--max-samples", 320)
    assert found.code == 0, found.report
    assert_dies_at_the_end_of_an_epoch(found)


def test_the_example_of_a_task_is_equal(tmp_path: Path) -> None:
    arguments = ("--code", EXAMPLES / "own_task", "--task", "task:DigitsTask")
    found = rehearse(tmp_path, *arguments, "--max-samples", 640)
    assert found.code == 0, found.report
