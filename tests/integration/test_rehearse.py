"""``everstep rehearse`` on loops and tasks of a user: what is equal passes, what is wrong is found
by name; and so is each mending of Everstep's own that is taken out again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 400


@dataclass(frozen=True)
class Rehearsed:
    """What the command printed, and how it ended."""

    code: int
    report: dict[str, Any]

    @property
    def outcomes(self) -> dict[str, str]:
        return {row["name"]: row["outcome"] for row in self.report["rows"]}

    @property
    def differences(self) -> list[dict[str, Any]]:
        return [row["difference"] for row in self.report["rows"] if row["difference"]]

    @property
    def kinds(self) -> set[str]:
        return {each["what"] for each in self.differences}


def rehearse(directory: Path, *arguments: object) -> Rehearsed:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "everstep.cli.main", "rehearse", "--json"]
    ended = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.stdout, ended.stderr
    return Rehearsed(ended.returncode, json.loads(ended.stdout))


LOOP = """
import os
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset
import everstep.train as es
{before}
if int(os.environ["WORLD_SIZE"]) > 1:
    dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(3)
bare = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
model = DistributedDataParallel(bare) if dist.is_initialized() else bare
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
x = torch.randn(24, 2)
samples = TensorDataset(x, x.sum(1))
{data}
def main():
    {top}
    with state:
        for a, b in data.batches(state, epochs=3):
            {within}
            loss = F.mse_loss(model(a).squeeze(1), b)
            loss.backward(); optimizer.step(); optimizer.zero_grad()
            state.step(loss=loss)
            {after}
main()
"""

PLAIN = """
data = es.loader(samples, global_batch_size=4)
state = es.protect(model=model, optimizer=optimizer, scheduler=scheduler)
"""
OWN_LOADER = """
{sampler}
data = es.loader(DataLoader(samples, batch_size=2, sampler=sampler))
state = es.protect(model=model, optimizer=optimizer, scheduler=scheduler, extra={{"data": data}})
"""
BALANCED = """
class Balanced(Sampler):
    def __init__(self): self.rng = np.random.default_rng(7)
    def __len__(self): return 12
    def __iter__(self): return iter(self.rng.permutation(24)[rank::2].tolist())
sampler = Balanced()
"""
EPOCH = "if state.step_number % 6 == 0: scheduler.step()"


def script(directory: Path, **parts: str) -> tuple[object, ...]:
    """Write a loop of a user, and return the arguments that rehearse it."""
    folder = directory / "code"
    folder.mkdir()
    filled = {"before": "", "data": PLAIN, "top": "pass", "within": "pass", "after": "pass"}
    (folder / "train.py").write_text(LOOP.format(**(filled | parts)))
    return ("--code", folder, "--script", "train.py", "--steps", 10)


def test_a_sound_loop_is_equal_whatever_dies(tmp_path: Path) -> None:
    """Its scheduler steps after the commit that ends an epoch."""
    found = rehearse(tmp_path, *script(tmp_path, after=EPOCH))
    assert found.code == 0, found.report
    assert found.report["text"] == ("A restart was rehearsed on this code: equal in every bit.")
    assert found.outcomes == {
        "undisturbed": "equal",
        "undisturbed, once more": "equal",
        "a rank killed within step 6": "equal",
        "rank 0 killed right after step 5": "equal",
        "all ranks killed after step 8": "equal",
        "a rank killed right after step 6: the end of an epoch": "equal",
        "all ranks killed after step 6: the end of an epoch": "equal",
        "an evaluation": "left out",
    }
    sources = [row["went_on_from"] for row in found.report["rows"] if row["went_on_from"]]
    assert sources[0] in ("step 5 (snapshot)", "step 6 (snapshot)") and len(sources) == 5


COUNTS = """
seen = 0
def set_rate():
    global seen
    seen += 1
    for group in optimizer.param_groups: group["lr"] = 0.1 / seen
"""


def test_a_count_in_a_global_that_sets_the_rate_is_found_and_named(tmp_path: Path) -> None:
    arguments = script(tmp_path, before=COUNTS, within="set_rate()")
    found = rehearse(tmp_path, *arguments, "--ranks", 1)
    assert found.code == 1
    assert found.outcomes["undisturbed, once more"] == "equal"
    assert found.kinds == {"the optimizer's groups"}
    first = found.differences[0]
    assert "lr: 0.0" in first["detail"] and first["where"].startswith("train.py, line ")
    assert any(each.startswith("train.py: seen (") for each in first["held"]), first
    assert "state.step_number" in first["advice"]


def test_code_that_cannot_be_rehearsed_says_why(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trains nothing that is protected')\n")
    found = rehearse(tmp_path, "--code", tmp_path, "--script", "train.py", "--ranks", 1)
    assert found.code == 2
    [row] = found.report["rows"]
    assert row["outcome"] == "impossible" and "es.protect" in row["text"]


CLOCK = """
import time
numbers = torch.Generator(); numbers.manual_seed(time.time_ns())
"""


@pytest.mark.chaos
def test_an_order_by_the_clock_is_not_the_same_twice(tmp_path: Path) -> None:
    within = "a = x[torch.randint(24, (2,), generator=numbers)]"
    found = rehearse(tmp_path, *script(tmp_path, before=CLOCK, within=within))
    assert found.code == 1
    [difference] = found.differences
    assert difference["what"] == "the samples" and difference["step"] == 1
    assert "the code is not the same twice by itself" in found.report["rows"][-1]["text"]


TASK = """
import torch, torch.nn as nn, torch.nn.functional as F
class Data(torch.utils.data.Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 8, generator=torch.Generator().manual_seed(1))
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i], (self.x[i].sum() > 0).long()
class Task:
    calls = 0
    def build_model(self): return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    def build_datasets(self): return dict(train=Data(160), val=Data(64))
    def loss(self, model, batch):
        x, y = batch
        {count}
        return F.cross_entropy(model(x), y, reduction="sum"){scale}, len(y)
"""


def task(directory: Path, count: str = "pass", scale: str = "") -> tuple[object, ...]:
    folder = directory / "code"
    folder.mkdir()
    (folder / "mine.py").write_text(TASK.format(count=count, scale=scale))
    sets = ("train.global_batch_size=32", "train.epochs=3", "scaling.use_gpu=false")
    options = [part for each in sets for part in ("--set", each)]
    return ("--code", folder, "--task", "mine:Task", "--steps", 10, *options)


@pytest.mark.chaos
def test_a_task_is_equal_in_fresh_processes_and_in_those_that_stay(tmp_path: Path) -> None:
    found = rehearse(tmp_path, *task(tmp_path), "--max-samples", 96)
    assert found.code == 0, found.report
    assert set(found.outcomes.values()) == {"equal"}
    what = "all ranks killed after step 3: the end of an epoch and an evaluation"
    assert what in found.outcomes  # 96 samples in batches of 32
    [stays] = [row for row in found.report["rows"] if "the others stay" in row["name"]]
    assert stays["went_on_from"].endswith("(process)")


@pytest.mark.chaos
def test_a_spec_whose_steps_draw_nothing_is_equal(tmp_path: Path) -> None:
    spec = Path(__file__).parents[2] / "examples" / "digits.yaml"
    sets = ("--set", "train.global_batch_size=64", "--set", "scaling.use_gpu=false")
    found = rehearse(tmp_path, spec, "--max-samples", 200, "--steps", 8, *sets)
    assert found.code == 0, found.report


@pytest.mark.chaos
def test_a_task_that_counts_its_calls_is_found(tmp_path: Path) -> None:
    count = "type(self).calls += model.training"
    found = rehearse(tmp_path, *task(tmp_path, count, " / max(1, type(self).calls)"))
    assert found.code == 1
    assert found.kinds == {"the gradients"}, found.report


BY_RANK = BALANCED.replace("default_rng(7)", "default_rng(7 + rank)").replace("[rank::2]", "[:12]")


@pytest.mark.chaos
def test_a_sampler_whose_generator_is_seeded_by_rank_is_equal(tmp_path: Path) -> None:
    found = rehearse(tmp_path, *script(tmp_path, data=OWN_LOADER.format(sampler=BY_RANK)))
    assert found.code == 0, found.report


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("without", "parts", "kind", "ranks"),
    [
        pytest.param(
            # what a loop changes after a commit is no part of it
            "from train_fn.protect.boundary import Boundary\n"
            "Boundary.close = lambda self: setattr(self, 'is_open', False)\n"
            "Boundary.problem = lambda self: None\n",
            {"after": EPOCH},
            "the optimizer's groups",
            2,
            id="scheduler after the commit",
        ),
        pytest.param(
            # a generator of a sampler's own begins anew at a restart
            "from train_fn.protect import followed\n"
            "followed.own_generators = lambda parts: []\n"
            "followed.differing = lambda expected, found: []\n",
            {"data": OWN_LOADER.format(sampler=BALANCED)},
            "the samples",
            2,
            id="generator of a sampler",
        ),
        pytest.param(
            # samplers are seeded alike on all ranks, and nobody compares
            "from train_fn.protect.batches import EqualBatches\n"
            "from train_fn.protect.protected import Protected\n"
            "EqualBatches.note = lambda self, marks: None\n",
            {"data": OWN_LOADER.format(sampler="sampler = list(range(24))")},
            "what ranks train on",
            2,
            id="equal batches",
        ),
        pytest.param(
            # which weights are trained is no part of a state
            "from train_fn.protect.part_copies import PartCopies\n"
            "PartCopies.freeze = lambda self, frozen: None\n",
            {
                "top": "bare[0].requires_grad_(False)",
                "after": "if state.step_number == 3: bare[0].requires_grad_(True)",
            },
            "the gradients",
            1,
            id="layers unfrozen",
        ),
    ],
)
def test_a_mending_that_is_taken_out_is_found(
    without: str, parts: dict[str, str], kind: str, ranks: int, tmp_path: Path
) -> None:
    mended, unmended = tmp_path / "mended", tmp_path / "unmended"
    for directory in (mended, unmended):
        directory.mkdir()
    found = rehearse(mended, *script(mended, **parts), "--ranks", ranks)
    if kind == "what ranks train on":  # refused by name
        assert found.code == 2 and "same batches" in found.report["rows"][0]["text"]
    else:
        assert found.code == 0, found.report
    found = rehearse(unmended, *script(unmended, before=without, **parts), "--ranks", ranks)
    assert found.code == 1, found.report
    assert kind in found.kinds, found.report
