"""What torch offers computes at one, two and three ranks what plain torch computes; what would not
is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from everstep.wire.events import EventKind
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness_failures import errors_of
from tests.integration.test_exactness_hostile import Rows
from tests.integration.test_exactness_small_batches import LR, small_spec
from tests.support.two_groups import only_in_chaos
from train_fn.samples.sampler import Sampler

HERE = "tests.integration.test_exactness_torch_features"
GLOBAL_BATCH, MICRO_BATCH, EPOCHS = 12, 4, 2
"""32 samples: the third step of an epoch has two micro-batches, so that a third rank has none."""


def seeded(build: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return build()


class Plain:
    def build_model(self) -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))  # type: ignore[no-any-return]

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Rows(), "val": None}

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        x, y = batch
        return F.mse_loss(model(x)[:, 0], y, reduction="sum"), len(y)


class Tokens(nn.Module):
    """Samples as words; the gradient of the embedding is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding((x.abs() * 5).long().clamp(0, 9)).mean(1))  # type: ignore[no-any-return]


class Sparse(Plain):
    def build_model(self) -> nn.Module:
        return seeded(Tokens)  # type: ignore[no-any-return]


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()[:, None]


class Complex(Plain):
    def build_model(self) -> nn.Module:
        return seeded(Waves)  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=True))  # type: ignore[no-any-return]


class Reentrant(Plain):
    """Activation checkpointing that runs a backward pass inside the backward pass."""

    def build_model(self) -> nn.Module:
        return seeded(Recomputed)  # type: ignore[no-any-return]


class Penalised(Plain):
    """A penalty on the gradient: the loss differentiates twice, and calls the model twice."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        x, y = batch
        x = x.clone().requires_grad_()
        out = model(x)[:, 0]
        [gradient] = torch.autograd.grad(out.sum(), x, create_graph=True)
        penalty = gradient.square().sum() + (model(-x)[:, 0] - out).square().sum()
        return F.mse_loss(out, y, reduction="sum") + penalty, len(y)


class Tied(Plain):
    def build_model(self) -> nn.Module:
        def build() -> nn.Module:
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
            model[2].weight = model[0].weight
            model[3].bias.requires_grad_(False)
            return model

        return seeded(build)  # type: ignore[no-any-return]


class Compiled(Plain):
    def build_model(self) -> nn.Module:
        return torch.compile(super().build_model(), backend="eager")  # type: ignore[no-any-return]


class StopsDropout(Plain):
    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        self.calls += 1
        if self.calls == 3:
            model.eval()
        return super().loss(model, batch)


class Slows(Plain):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)
        return self.optimizer

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        self.optimizer.param_groups[0]["momentum"] *= 0.9
        return super().loss(model, batch)


class Clamps(Plain):
    """Clamps the weights, but not in the first pass, which is looked at."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        self.calls += 1
        if self.calls > 4:
            for parameter in model.parameters():
                parameter.data.clamp_(-0.1, 0.1)
        return super().loss(model, batch)

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Rows(), "val": Rows()}

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": super().loss(model, batch)}


class Accumulating(Rows):
    """A data set that changes its samples when they are read."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index]
        x += 0.1
        return x, x.sum()


class Accumulates(Plain):
    def build_datasets(self) -> dict[str, Any]:
        return {"train": Accumulating(), "val": None}


TASKS = {
    task.__name__.lower(): task
    for task in (
        Plain,
        Sparse,
        Complex,
        Reentrant,
        Penalised,
        Tied,
        Compiled,
        StopsDropout,
        Slows,
        Clamps,
        Accumulates,
    )
}


def job_of(name: str, world_size: int, tmp_path: Path) -> Job:
    run_dir = make_run_dir(tmp_path, f"run_{name}_{world_size}")
    spec = small_spec(GLOBAL_BATCH, MICRO_BATCH, epochs=EPOCHS)
    return Job(run_dir, spec, world_size, setup=f"{HERE}:{TASKS[name].__name__}")


def plain_losses(name: str) -> dict[int, float]:
    """Every step's loss in one process, by torch alone."""
    task, data = TASKS[name](), Rows()
    model = task.build_model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    spec = small_spec(GLOBAL_BATCH, MICRO_BATCH, epochs=EPOCHS)
    sampler = Sampler(len(data), GLOBAL_BATCH, MICRO_BATCH, spec.train.seed)
    losses = {}
    for epoch in range(EPOCHS):
        for k in range(sampler.steps_per_epoch):
            x, y = zip(*(data[int(index)] for index in sampler.global_batch(epoch, k)), strict=True)
            loss, weight = task.loss(model, (torch.stack(x), torch.stack(y)))
            optimizer.zero_grad()
            (loss / weight).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses[len(losses) + 1] = loss.item() / weight
    return losses


@pytest.mark.parametrize(
    "name",
    [
        *("sparse", "reentrant", "tied", "compiled"),
        *only_in_chaos("complex", "penalised"),
    ],
)
def test_it_is_what_plain_torch_computes_at_every_world_size(name: str, tmp_path: Path) -> None:
    expected = plain_losses(name)
    assert len(expected) == 6
    for world_size in (1, 2, 3):
        losses = train_to_end(job_of(name, world_size, tmp_path), tmp_path).losses
        assert losses == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("world_size", [2, *only_in_chaos(1, 3)])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("stopsdropout", "StopsDropout.loss"),
        ("slows", "loss changed options of the optimizer: momentum"),
    ],
)
def test_what_loss_changes_once_for_each_micro_batch_is_refused(
    name: str, problem: str, world_size: int, tmp_path: Path
) -> None:
    errors = errors_of(run_ranks(job_of(name, world_size, tmp_path), tmp_path))
    [message] = {error.message for error in errors if error.type == "BadTask"}
    assert message.startswith(problem)
    assert "another number of times, so ranks would train different models" in message


@pytest.mark.parametrize("world_size", [2, *only_in_chaos(3)])
def test_weights_that_loss_changes_are_found_when_ranks_are_compared(
    world_size: int, tmp_path: Path
) -> None:
    errors = errors_of(run_ranks(job_of("clamps", world_size, tmp_path), tmp_path))
    assert len(errors) == world_size
    assert {error.type for error in errors} <= {"RanksApart", "PeerApart"}
    assert "in weights 0.bias" in errors[0].message
    assert "look in the task for what changes weights" in errors[0].message


@pytest.mark.parametrize(("name", "num_warnings"), [("plain", 0), ("accumulates", 1)])
def test_samples_that_change_when_they_are_read_are_named(
    name: str, num_warnings: int, tmp_path: Path
) -> None:
    outcome = train_to_end(job_of(name, 1, tmp_path), tmp_path)
    warnings = outcome.of_kind(EventKind.TRAINING_STARTED)[0]["warnings"]
    assert [text[:44] for text in warnings] == ["train sample 0 is another each time it is re"] * (
        num_warnings
    )
