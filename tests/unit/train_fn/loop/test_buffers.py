"""Running statistics where backward passes run forward passes again, or that are unfrozen later."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from everstep.spec.run_spec import RunSpec
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.integration.moving_buffers import Rows
from tests.support.one_rank import one_rank, small_task_alone
from tests.support.raw_specs import TASK
from train_fn.checkpoints.saver import Saver
from train_fn.loop import build
from train_fn.loop.attempt import train

pytestmark = pytest.mark.own_process

SPEC = RunSpec.model_validate(
    {
        "name": "buffers",
        "task": TASK,
        "train": {
            "epochs": 1,
            "global_batch_size": 10,
            "micro_batch_size": 7,
            "loader": {"num_workers": 0},
        },
        "checkpoint": {"every_steps": 100},
    }
)


def model_of(run_dir: RunDir) -> dict[str, torch.Tensor]:
    store = CheckpointStore(run_dir)
    newest = store.list()[-1]
    found: dict[str, torch.Tensor] = torch.load(
        io.BytesIO(store.read_file(newest.name, "model.pt")), weights_only=True
    )
    return found


class Normed(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self._checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(
            checkpoint(self._norm, x, use_reentrant=False) if self._checkpointed else self._norm(x)
        )
        return found.squeeze(1)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.first(x))
        return found


class Task:
    def __init__(self, *, checkpointed: bool) -> None:
        self.model = Normed(checkpointed=checkpointed)

    def build_model(self) -> nn.Module:
        torch.manual_seed(1)
        self.model = Normed(checkpointed=self.model._checkpointed)
        return self.model

    def build_datasets(self) -> dict[str, Any]:
        return {"train": Rows(), "val": None}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


class Unfreezes(Task):
    """Trains its statistics from the second epoch on."""

    def build_model(self) -> nn.Module:
        super().build_model()
        self.model.norm.eval()
        return self.model

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        self.model.norm.train()


def test_statistics_that_are_unfrozen_later_are_those_of_the_steps_since(tmp_path: Path) -> None:
    raw = SPEC.model_dump()
    spec = RunSpec.model_validate({**raw, "train": {**raw["train"], "epochs": 2}})
    run_dir, task = (
        RunDir(open_storage(str(tmp_path)), "run_unfreezes"),
        Unfreezes(checkpointed=False),
    )
    with small_task_alone(tmp_path, Saver.save_if_due), pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_task", lambda spec: task)
        assert train(one_rank(spec, run_dir)) is None
    found = model_of(run_dir)
    assert int(found["norm.num_batches_tracked"]) == 9 and bool(found["norm.running_mean"].any())


@pytest.mark.parametrize("micro_batch_size", [10, 5])
def test_gradient_checkpointing_moves_statistics_once_a_step(
    micro_batch_size: int, tmp_path: Path
) -> None:
    raw = SPEC.model_dump()
    spec = RunSpec.model_validate(
        {**raw, "train": {**raw["train"], "micro_batch_size": micro_batch_size}}
    )
    found = []
    for checkpointed in (False, True):
        run_dir, task = (
            RunDir(open_storage(str(tmp_path)), f"run_{checkpointed}"),
            Task(checkpointed=checkpointed),
        )
        with small_task_alone(tmp_path, Saver.save_if_due), pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "build_task", lambda spec, task=task: task)
            assert train(one_rank(spec, run_dir)) is None
        found.append(model_of(run_dir))
    plain, checkpointed_ = found
    assert int(plain["norm.num_batches_tracked"]) == 9
    for name, value in plain.items():
        torch.testing.assert_close(
            checkpointed_[name],
            value,
            rtol=1e-5,
            atol=1e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )
