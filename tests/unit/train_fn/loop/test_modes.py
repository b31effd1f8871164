"""Train and eval modes: what the task built holds in training, and comes back after an
evaluation."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from everstep.spec.run_spec import RunSpec
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.integration.trainees import Regression
from tests.support.one_rank import one_rank, small_task_alone
from tests.support.raw_specs import TASK
from tests.support.saves import make_state
from train_fn.checkpoints.saver import Saver
from train_fn.loop import build
from train_fn.loop.attempt import train
from train_fn.step.precision import evaluating, set_modes_for_training


class NormInEval(nn.Module):
    """Keeps its BatchNorm in eval mode by a ``train`` of its own, as detection libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def train(self, mode: bool = True) -> NormInEval:
        super().train(mode)
        self.norm.eval()
        return self


class Merging(nn.Linear):
    """Adds what it learns to its weight in eval mode, and takes it off again in train mode, as LoRA
    layers do."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.merged == mode:
            self.merged = not mode
            self.weight.data += 1.0 if self.merged else -1.0
        return self


def test_a_model_in_eval_mode_as_a_whole_is_put_into_train_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())).eval()
    assert set_modes_for_training(model) == []
    assert all(module.training for module in model.modules())


def test_modules_that_the_task_put_into_eval_mode_stay_there() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()), NormInEval()
    )
    model[1][0].eval()
    assert set_modes_for_training(model) == ["1.0", "2.norm"]
    assert [name for name, module in model.named_modules() if not module.training] == [
        "1.0",
        "2.norm",
    ]


def test_after_an_evaluation_every_module_is_in_the_mode_it_was_in_whatever_happens() -> None:
    model = nn.Sequential(
        Merging(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()), NormInEval()
    )
    model[1][0].eval()
    model[2].norm.training = True  # against its own train(): by a hook, say
    before, weight = (
        [module.training for module in model.modules()],
        model[0].weight.detach().clone(),
    )
    with pytest.raises(KeyError), evaluating(model):
        assert not any(module.training for module in model.modules())
        assert torch.equal(model[0].weight, weight + 1)
        raise KeyError
    assert [module.training for module in model.modules()] == before
    torch.testing.assert_close(model[0].weight.detach(), weight)


def test_modes_that_a_hook_changed_are_part_of_the_state() -> None:
    frozen, restored = (
        make_state(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout().eval()))
        for _ in range(2)
    )
    frozen.model[1].eval()  # type: ignore[index]
    frozen.model[2].train()  # type: ignore[index]
    state = frozen.state_dict()
    restored.load_state_dict(state)
    assert [module.training for module in restored.model.modules()] == [True, True, False, True]


class FrozenNorm(Regression):
    def build_model(self) -> nn.Module:
        norm = nn.BatchNorm1d(4).eval().requires_grad_(False)
        norm.running_mean += 0.25  # type: ignore[operator]
        return nn.Sequential(norm, nn.Linear(4, 1))


def test_a_frozen_batch_norm_keeps_its_statistics_and_trains_as_plain_torch_does(
    tmp_path: Path,
) -> None:
    """Three epochs of one batch each, with an evaluation after each."""
    spec = RunSpec.model_validate(
        {
            "name": "modes",
            "task": TASK,
            "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
            "schedule": {"name": "constant", "warmup_steps": 0},
            "train": {
                "epochs": 3,
                "global_batch_size": 90,
                "micro_batch_size": 90,
                "loader": {"num_workers": 0},
            },
        }
    )
    batches: list[dict[str, torch.Tensor]] = []

    class Task(FrozenNorm):
        def loss(
            self, model: nn.Module, batch: dict[str, torch.Tensor]
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if model.training:
                batches.append(batch)
            return super().loss(model, batch)

    run_dir, task = RunDir(open_storage(str(tmp_path)), "run_modes"), Task()
    store = CheckpointStore(run_dir)
    torch.manual_seed(0)
    plain = task.build_model()
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    task.build_model = lambda: plain  # type: ignore[method-assign]
    with small_task_alone(tmp_path, Saver.save_if_due), pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build_task", lambda spec: task)
        assert train(one_rank(spec, run_dir)) is None

    right = FrozenNorm().build_model()
    right.load_state_dict(start)
    optimizer = torch.optim.SGD(right[1].parameters(), lr=0.1)  # type: ignore[index]
    for batch in batches[1:]:  # the first is the warm-up
        optimizer.zero_grad()
        errors = F.mse_loss(right(batch["x"]).squeeze(1), batch["y"], reduction="none")
        ((errors * batch["tokens"]).sum() / batch["tokens"].sum()).backward()
        optimizer.step()
    assert len(batches) == 4
    newest = store.list()[-1].name
    found = torch.load(io.BytesIO(store.read_file(newest, "model.pt")), weights_only=True)
    assert found["0.running_mean"].tolist() == [0.25] * 4
    for name, value in right.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
