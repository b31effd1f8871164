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

from everstep import AsyncClient, Client, UsageError

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


def rehearse(directory: Path, *arguments: object, every: bool = True) -> Rehearsed:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "everstep.cli.main", "rehearse", "--json"]
    command += ["--all"] if every else []
    ended = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "EVERSTEP_HOME": str(directory / "home")},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.stdout, ended.stderr
    return Rehearsed(ended.returncode, json.loads(ended.stdout))


LOOP = """
import os
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
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
    with state:
        for a, b in data.batches(state, epochs=3):
            {within}
            loss = F.mse_loss(model(a).squeeze(1), b)
            loss.backward()
            optimizer.step(); optimizer.zero_grad()
            state.step(loss=loss)
            {after}
main()
"""

PLAIN = """
data = es.loader(samples, global_batch_size=4)
state = es.protect(model=model, optimizer=optimizer, scheduler=scheduler)
"""
EPOCH = "if state.step_number % 6 == 0: scheduler.step()"


def script(directory: Path, **parts: str) -> tuple[object, ...]:
    """Write a loop of a user, and return the arguments that rehearse it."""
    folder = directory / "code"
    folder.mkdir()
    filled = {"before": "", "data": PLAIN, "within": "pass", "after": "pass"}
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
    assert sources[2] in ("step 5 (snapshot)", "step 6 (snapshot)") and len(sources) == 5


COUNTS = """
seen = 0
def set_rate():
    global seen
    seen += 1
    for group in optimizer.param_groups: group["lr"] = 0.1 / seen
"""


def test_a_count_in_a_global_that_sets_the_rate_is_found_and_named(tmp_path: Path) -> None:
    arguments = script(tmp_path, before=COUNTS, within="set_rate()")
    found = rehearse(tmp_path, *arguments, "--ranks", 1, every=False)
    assert found.code == 1
    assert list(found.outcomes.items())[1:] == [
        ("undisturbed, once more", "equal"),
        ("all ranks killed after step 8", "different"),
        ("4 more deaths", "left out"),
    ], "it ends at the first difference"
    assert found.kinds == {"the optimizer's groups"}
    first = found.differences[0]
    assert "lr: 0.0" in first["detail"] and first["where"].startswith("train.py, line ")
    assert any(each.startswith("train.py: seen, line ") for each in first["held"]), first
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
    def build_model(self): return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    def build_datasets(self): return dict(train=Data(160), val=Data(64))
    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)
"""


def task(directory: Path) -> tuple[object, ...]:
    folder = directory / "code"
    folder.mkdir()
    (folder / "mine.py").write_text(TASK)
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


# ---------------------------------------------------------------- mendings taken out


@dataclass(frozen=True)
class Mending:
    """A fault of loops that Everstep mends, and what a rehearsal finds without the mending."""

    without: str
    """Takes the mending out, in the process of each rank."""
    kind: str
    """Of the difference that is found then."""
    parts: dict[str, str]
    """Of the loop."""
    ranks: int = 1


AFTER_COMMIT = """
from train_fn.protect.boundary import Boundary
Boundary.close = lambda self: setattr(self, "is_open", False)
Boundary.problem = lambda self: None
"""
IMITATED = """
from train_fn.protect import data_order, followed
data_order.skips = followed.skips = lambda loader: True
followed.differing = lambda expected, found: []
"""
ENDLESS = """
class Again:
    def __init__(self, inner): self.sampler = inner
    def __iter__(self):
        while True: yield from iter(self.sampler)
class Endless(DataLoader):
    def __init__(self, *a, **k):
        super().__init__(*a, **k)
        object.__setattr__(self, "batch_sampler", Again(self.batch_sampler))
        self.source = super().__iter__()
    def __len__(self): return len(self.batch_sampler.sampler)
    def __iter__(self):
        for _ in range(len(self)): yield next(self.source)
data = es.loader(Endless(samples, batch_size=4, shuffle=True))
state = es.protect(model=model, optimizer=optimizer, scheduler=scheduler, extra={"data": data})
"""
AVERAGE = """
class Average:
    def __init__(self): self.shadow = [p.detach().clone() for p in model.parameters()]
    @torch.no_grad()
    def update(self):
        for s, p in zip(self.shadow, model.parameters()): s.mul_(0.9).add_(p, alpha=0.1)
    def state_dict(self): return {"shadow": self.shadow}
    def load_state_dict(self, state): self.shadow = list(state["shadow"])
average = Average()
data = es.loader(samples, global_batch_size=4)
state = es.protect(
    model=model, optimizer=optimizer, scheduler=scheduler, extra={"average": average}
)
"""
TEACHER = """
teacher = torch.nn.Linear(2, 1).requires_grad_(False)
@torch.no_grad()
def follow():
    for t in teacher.parameters(): t.mul_(0.9).add_(bare[0].weight.mean(), alpha=0.1)
data = es.loader(samples, global_batch_size=4)
state = es.protect(
    model={"net": model, "teacher": teacher}, optimizer=optimizer, scheduler=scheduler
)
"""
MENDINGS = {
    "1, scheduler after the commit": Mending(
        AFTER_COMMIT, "the optimizer's groups", {"after": EPOCH}, ranks=2
    ),
    "3, loader whose batch sampler repeats": Mending(IMITATED, "the samples", {"data": ENDLESS}),
    "11, average in a plain object": Mending(
        AFTER_COMMIT, "an extra", {"data": AVERAGE, "after": "average.update()"}, ranks=2
    ),
    "27, teacher that follows": Mending(
        AFTER_COMMIT, "the weights", {"data": TEACHER, "after": "follow()"}, ranks=2
    ),
}
"""One of each kind of difference. What no rehearsal finds: data that change by epoch and are not
told of it. They are wrong without any death, in both trainings alike."""


@pytest.mark.chaos
@pytest.mark.parametrize("name", MENDINGS)
def test_a_mending_that_is_taken_out_is_found(name: str, tmp_path: Path) -> None:
    mending = MENDINGS[name]
    mended, unmended = tmp_path / "mended", tmp_path / "unmended"
    for directory in (mended, unmended):
        directory.mkdir()
    options = ("--ranks", mending.ranks)
    found = rehearse(mended, *script(mended, **mending.parts), *options)
    assert found.code == 0, found.report
    parts = {"before": mending.without, **mending.parts}
    found = rehearse(unmended, *script(unmended, **parts), *options)
    assert found.code == 1, found.report
    assert mending.kind in found.kinds, found.report


# ---------------------------------------------------------------- from Python


@pytest.mark.chaos
async def test_a_client_rehearses_as_the_command_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trains nothing that is protected')\n")
    with Client("http://127.0.0.1:9", "none") as client:
        found = client.rehearse(tmp_path, script="train.py", ranks=1)
        with pytest.raises(UsageError, match="--steps"):
            client.rehearse(tmp_path, script="train.py", steps=3)
    assert found.outcome == "impossible" and "es.protect" in found.rows[0].text
    async with AsyncClient("http://127.0.0.1:9", "none") as both:
        assert await both.rehearse(tmp_path, script="train.py", ranks=1) == found
