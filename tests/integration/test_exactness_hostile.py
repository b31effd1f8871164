"""Tasks whose result would depend on the number of ranks without anybody noticing: refused, or
named, at every world size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from everstep.wire import ErrorKind
from everstep.wire.events import EventKind
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness_failures import errors_of
from tests.integration.test_exactness_small_batches import small_spec
from tests.support.two_groups import only_in_chaos

HERE = "tests.integration.test_exactness_hostile"
NUM_SAMPLES = 32


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples are views of one tensor."""

    def __init__(self) -> None:
        self.x = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.x[index].sum()


class Halved:
    """A loss that halves its samples in place: the next epoch, or a warm-up pass, finds them so."""

    copies = False

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Rows(), "val": None}

    def collate(self, samples: list[Any]) -> Any:
        return [x.clone() if self.copies else x for x, _ in samples], torch.stack(
            [y for _, y in samples]
        )

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        rows, y = batch
        for row in rows:
            row.mul_(0.5)
        return F.mse_loss(model(torch.stack(rows))[:, 0], y, reduction="sum"), len(y)


class HalvedCopies(Halved):
    copies = True


class Clipped(HalvedCopies):
    """Clips the gradient of a weight by a hook on it."""

    def build_model(self) -> nn.Module:
        model = nn.Linear(4, 1)
        model.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return model


class Hiding(nn.Linear):
    """Leaves its teacher out of its ``state_dict``."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.teacher = nn.Linear(4, 1).requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        whole = super().state_dict(*args, **kwargs)
        return {name: value for name, value in whole.items() if "teacher" not in name}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict=False, assign=assign)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.teacher(x)


class Noisy(torch.optim.SGD):
    """Draws noise, and has values of other types than the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state:
                state |= {"t": torch.zeros(1, dtype=torch.int32), "m": weight.double()}
            state["t"] += 1
            state["m"].sub_(0.01 * weight.grad / 3 + 0.01 * torch.randn_like(weight) / state["t"])
            weight.copy_(state["m"])


class Odd(HalvedCopies):
    def build_model(self) -> nn.Module:
        return Hiding()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Noisy((each for each in model.parameters() if each.requires_grad), 0.1)

    def after_step(self, model: Hiding, step: int) -> None:
        model.teacher.weight.lerp_(model.weight, 0.1)


class Replaced(HalvedCopies):
    """Puts another parameter in the place of the weight, which the optimizer does not hold."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        self.calls += 1
        if self.calls == 3:
            model.weight = nn.Parameter(model.weight.detach().clone())
        return super().loss(model, batch)


class Zeroing(HalvedCopies):
    """Throws away the gradients of earlier micro-batches."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        model.zero_grad(set_to_none=False)
        return super().loss(model, batch)


class ZeroingToNone(HalvedCopies):
    def loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        model.zero_grad()
        return super().loss(model, batch)


class Doubles(Halved):
    """Everything in float64, by torch's default."""

    copies = True

    def build_model(self) -> nn.Module:
        torch.set_default_dtype(torch.float64)
        return nn.Linear(4, 1)

    def collate(self, samples: list[Any]) -> Any:
        rows, y = super().collate(samples)
        return [row.double() for row in rows], y.double()


@pytest.mark.parametrize("world_size", [2, *only_in_chaos(1, 3)])
def test_a_loss_that_changes_the_data_sets_own_samples_is_refused_by_every_rank(
    world_size: int, tmp_path: Path
) -> None:
    job = Job(make_run_dir(tmp_path), small_spec(16, 4), world_size, setup=f"{HERE}:Halved")
    errors = errors_of(run_ranks(job, tmp_path))
    assert len(errors) == world_size
    assert {(error.type, error.kind) for error in errors} == {("BadTask", ErrorKind.USER)}
    [message] = {error.message for error in errors}
    assert "changes its batch in place, and with it the samples" in message
    assert "test_exactness_hostile.py" in message or "Halved.loss" in message


@pytest.mark.parametrize(("setup", "num_warnings"), [("HalvedCopies", 0), ("Clipped", 1)])
def test_a_batch_may_be_changed_and_hooks_on_gradients_are_named(
    setup: str, num_warnings: int, tmp_path: Path
) -> None:
    job = Job(make_run_dir(tmp_path), small_spec(16, 4, epochs=1), 2, setup=f"{HERE}:{setup}")
    outcome = train_to_end(job, tmp_path)
    assert len(outcome.losses) == 2
    warnings = outcome.of_kind(EventKind.TRAINING_STARTED)[0]["warnings"]
    assert [text[:24] for text in warnings] == ["gradient hooks on weight"] * num_warnings


def test_values_of_other_types_noise_and_a_hidden_teacher_outlive_a_rank(tmp_path: Path) -> None:
    calm, killed = (
        Job(make_run_dir(tmp_path, name), small_spec(16, 4, epochs=3), 2, setup=f"{HERE}:Odd")
        for name in ("calm", "killed")
    )
    unbroken = train_to_end(calm, tmp_path)
    survivor, _ = run_ranks(replace(killed, killed=(1, 4)), tmp_path)
    resumed = train_to_end(replace(killed, attempt=2), tmp_path)
    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("snapshot", 4)
    assert survivor.losses | resumed.losses == unbroken.losses


@pytest.mark.parametrize("world_size", [2, *only_in_chaos(1)])
def test_a_parameter_that_the_loss_replaces_never_ends_in_a_run_that_succeeds(
    world_size: int, tmp_path: Path
) -> None:
    job = Job(
        make_run_dir(tmp_path), small_spec(16, 4, epochs=1), world_size, setup=f"{HERE}:Replaced"
    )
    errors = errors_of(run_ranks(job, tmp_path))
    assert {error.type for error in errors} == {"BadTask"}
    assert "put other parameters in place" in errors[0].message


@pytest.mark.parametrize(
    ("world_size", "setup"),
    [(2, "ZeroingToNone"), *only_in_chaos((1, "Zeroing"), (3, "Zeroing"))],
)
def test_a_loss_that_throws_gradients_away_is_refused_by_every_rank(
    world_size: int, setup: str, tmp_path: Path
) -> None:
    job = Job(make_run_dir(tmp_path), small_spec(16, 4), world_size, setup=f"{HERE}:{setup}")
    errors = errors_of(run_ranks(job, tmp_path))
    assert len(errors) == world_size
    assert {error.type for error in errors} == {"BadTask"}
    assert all("changes gradients, by zero_grad()" in error.message for error in errors)


def test_another_default_dtype_changes_nothing_of_the_exchange(tmp_path: Path) -> None:
    found = []
    for world_size in (1, 2, 3):
        run_dir = make_run_dir(tmp_path, f"run_{world_size}")
        job = Job(run_dir, small_spec(16, 4), world_size, setup=f"{HERE}:Doubles")
        found.append(train_to_end(job, tmp_path).losses)
    alone, *others = found
    assert len(alone) == 2
    for losses in others:
        assert losses == pytest.approx(alone, rel=1e-6)
