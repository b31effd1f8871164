"""The beginning of a task of one's own: a package that trains as it stands, to be changed piece by
piece."""

from __future__ import annotations

import keyword
import sys
from pathlib import Path
from string import Template

from everstep.errors import UsageError

_TAKEN = frozenset(
    {"everstep", "storage", "service", "train_fn", "tests", "torch", "torchvision", "ray", "numpy"}
)
"""Names that would hide, or be hidden by, what runs beside the task."""

_TASK = '''"""What is trained on what. Everstep calls it on every rank, and is not imported."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Spirals(Dataset):
    """Points on two spirals, each labelled with its arm.

    Your own data: anything with a length and an item for every index.
    """

    def __init__(self, num_samples, noise, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(num_samples) % 2
        radius = torch.rand(num_samples, generator=generator)
        angle = 3 * math.pi * radius + math.pi * self.labels
        self.points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
        self.points += noise * torch.randn(num_samples, 2, generator=generator)
        # Changes when the data does: a run is not resumed on other data than it began with.
        self.fingerprint = f"spirals/{num_samples}/{noise}/{seed}"

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


class $class_name:
    """Its arguments come from the spec's ``code.args``."""

    def __init__(self, width=64, noise=0.02):
        self.width, self.noise = width, noise

    def build_model(self):
        """The model, on the CPU: Everstep seeds the generator, moves, wraps and restores it."""
        return nn.Sequential(
            nn.Linear(2, self.width),
            nn.ReLU(),
            nn.Linear(self.width, self.width),
            nn.ReLU(),
            nn.Linear(self.width, 2),
        )

    def build_datasets(self):
        """Map-style data sets; ``val`` may be None."""
        train = Spirals(4000, self.noise, seed=0)
        return {"train": train, "val": Spirals(1000, self.noise, seed=1)}

    def loss(self, model, batch):
        """(loss summed over the micro-batch, number of summands).

        Everstep takes the mean over the global batch.
        """
        points, labels = batch
        return F.cross_entropy(model(points), labels, reduction="sum"), len(labels)

    def metrics(self, model, batch):
        """(sum, weight) by name over a micro-batch of ``val``; reported as val_accuracy."""
        points, labels = batch
        return {"accuracy": ((model(points).argmax(dim=1) == labels).sum(), len(labels))}
'''

_TEST = '''"""What Everstep asks of the task, tried without Everstep: python -m pytest -q"""

import torch
from torch.utils.data import default_collate

from $name.task import $class_name


def first_batch(task, size=256):
    """Samples as they are collated for a micro-batch."""
    dataset = task.build_datasets()["train"]
    return default_collate([dataset[index] for index in range(min(size, len(dataset)))])


def test_the_loss_is_a_sum_that_comes_with_its_weight():
    task = $class_name()
    loss_sum, weight = task.loss(task.build_model(), first_batch(task))
    assert loss_sum.ndim == 0
    assert loss_sum.isfinite()
    assert float(weight) > 0


def test_every_parameter_takes_part():
    task = $class_name()
    model = task.build_model()
    task.loss(model, first_batch(task))[0].backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_it_learns():
    torch.manual_seed(0)
    task = $class_name()
    model, batch = task.build_model(), first_batch(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(200):
        loss_sum, weight = task.loss(model, batch)
        optimizer.zero_grad()
        (loss_sum / weight).backward()
        optimizer.step()
        losses.append(float(loss_sum.detach() / weight))
    assert losses[-1] < 0.5 * losses[0]


def test_metrics_are_sums_with_weights():
    task = $class_name()
    with torch.no_grad():
        measured = task.metrics(task.build_model(), first_batch(task))
    assert all(0 <= float(total) <= float(weight) for total, weight in measured.values())
'''

_SPEC = """# The training around the task. Every field: the service's /docs, or GET /v1/catalog.
#   everstep submit spec.yaml --code . --task $name.task:$class_name --watch
name: $run_name
optimizer: {name: adamw, lr: 3e-3, weight_decay: 0.01}
schedule: {name: cosine, warmup_steps: 20}
train:
  epochs: 20
  global_batch_size: 128 # samples in one optimizer step, however many ranks share them
  micro_batch_size: 32
scaling: {min_workers: 1, max_workers: 2} # goes on with one rank where a node is lost
checkpoint: {every_steps: 50, best_metric: accuracy}
"""

_README = """# $name

A task for Everstep: `$name/task.py` says what is trained on what, `spec.yaml` how.

    # the task alone, in seconds
    python -m pytest -q
    # on the cluster, with recovery
    everstep submit spec.yaml --code . --task $name.task:$class_name --watch

Change `build_model`, `build_datasets` and `loss` in turn, and run the test after each.
"""

_IGNORE = """# Not uploaded, as in a .gitignore
.git/
.venv/
__pycache__/
.pytest_cache/
out/
*.pt
"""


def write_skeleton(name: str, parent: Path) -> Path:
    """Write the task package ``name`` into a new folder of that name below ``parent``; the folder.
    Raises UsageError, OSError."""
    _check(name)
    folder = parent / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} exists and is not empty; choose another name, or another place by --in"
        )
    words = {
        "name": name,
        "class_name": "".join(part[:1].upper() + part[1:] for part in name.split("_")),
        "run_name": name.strip("_").replace("_", "-"),
    }
    files = {
        f"{name}/__init__.py": "",
        f"{name}/task.py": _TASK,
        "test_task.py": _TEST,
        "spec.yaml": _SPEC,
        "README.md": _README,
        ".everstepignore": _IGNORE,
    }
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(text).substitute(words))
    return folder


def _check(name: str) -> None:
    """Raises UsageError where ``name`` cannot be imported, or would be taken for something else."""
    if (
        not (name.isascii() and name.isidentifier())
        or keyword.iskeyword(name)
        or not name.strip("_")
    ):
        raise UsageError(
            f"{name!r} cannot be imported as a package; use letters, digits and _, for example "
            "my_task"
        )
    if name in _TAKEN or name in sys.stdlib_module_names:
        raise UsageError(
            f"{name!r} is the name of a package that runs beside the task; choose another"
        )
