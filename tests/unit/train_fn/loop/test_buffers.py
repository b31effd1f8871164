"""Buffers that a model puts another tensor in place of: kept for a step that fails, and restored
where they are now."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from everstep.spec.run_spec import RunSpec
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.integration.trainees import Regression
from tests.support.one_rank import one_rank, small_task_alone
from tests.support.storage_places import quick_directory
from train_fn.checkpoints.saver import Saver
from train_fn.loop import build
from train_fn.loop.attempt import train
from train_fn.recovery.evidence import StepFailed

pytestmark = pytest.mark.own_process

SPEC = RunSpec.model_validate(
    {
        "name": "buffers",
        "task": {
            "name": "image_classification",
            "model": {"name": "mini_resnet"},
            "data": {"name": "digits"},
        },
        "train": {
            "epochs": 1,
            "global_batch_size": 10,
            "micro_batch_size": 7,
            "loader": {"num_workers": 0},
        },
        "checkpoint": {"every_steps": 100},
    }
)


class Averaging(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        return x - self.mean


class Masked(nn.Module):
    """Makes its buffer anew for each batch's size."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask = torch.ones(len(x))
        return x * self.mask[:, None]


class Interrupted(Regression):
    """Raises once, in the second of a step's two passes."""

    break_at: int | None = None
    num_passes = 0

    def build_model(self) -> nn.Module:
        return nn.Sequential(Averaging(), Masked(), nn.Linear(4, 1))

    def loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = super().loss(model, batch)
        self.num_passes += 1
        if self.num_passes == self.break_at:
            raise ConnectionError
        return found


@pytest.fixture
def storage() -> Iterator[str]:
    with quick_directory() as directory:
        yield directory


def model_of(run_dir: RunDir) -> dict[str, torch.Tensor]:
    store = CheckpointStore(run_dir)
    newest = store.list()[-1]
    found: dict[str, torch.Tensor] = torch.load(
        io.BytesIO(store.read_file(newest.name, "model.pt")), weights_only=True
    )
    return found


def trained(
    storage: str, name: str, shared_memory: Path, break_at: int | None
) -> dict[str, torch.Tensor]:
    run_dir = RunDir(open_storage(storage), name)
    task = Interrupted()
    with small_task_alone(shared_memory, Saver.offer), pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_task", lambda spec: task)
        task.break_at = break_at
        if break_at is not None:
            with pytest.raises(StepFailed):
                train(one_rank(SPEC, run_dir, attempt=1))
        assert train(one_rank(SPEC, run_dir, attempt=2)) is None
    return model_of(run_dir)


def test_a_step_that_fails_leaves_no_trace_in_a_buffer_that_is_replaced(
    storage: str, tmp_path: Path
) -> None:
    """The second pass of the fifth step is the tenth: the warm-up's is not counted. Micro-batches
    are of seven and three."""
    plain = trained(storage, "run_plain", tmp_path, None)
    broken = trained(storage, "run_broken", tmp_path, 2 * 5)
    assert plain["0.mean"].abs().sum() > 0
    assert {name: value.tolist() for name, value in broken.items()} == {
        name: value.tolist() for name, value in plain.items()
    }
