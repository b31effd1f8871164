"""``checkpoint.parameters: trainable``: states without the frozen parameters, which merge with what
the task builds, and are refused where that is something else."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from everstep.spec.run_spec import RunSpec
from storage.checkpoints.store import CheckpointStore
from tests.integration.adapted_task import LoRA
from tests.support.one_rank import journal_of
from tests.support.own_task_runs import TaskRuns, refusal
from train_fn.checkpoints.commit import load_checkpoint
from train_fn.context import WorkerContext
from train_fn.loop.attempt import train
from train_fn.recovery.evidence import StepFailed

pytestmark = pytest.mark.own_process

FROZEN = {"base.weight", "base.bias", "tied.weight", "tied.bias"}
TRAINABLE = {"every_steps": None, "parameters": "trainable"}
ALL = {"every_steps": None}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskRuns:
    return TaskRuns(tmp_path, monkeypatch)


def steps(most: int) -> dict[str, Any]:
    return {"max_steps": most, "ema_decay": 0.9, "epochs": 2}


def state_of(ctx: WorkerContext) -> dict[str, Any]:
    return load_checkpoint(ctx.run_dir, ctx.checkpoints.list()[-1])


def losses_of(ctx: WorkerContext) -> dict[int, float]:
    return {point["step"]: point["values"]["loss"] for point in journal_of(ctx).points}


def test_a_run_that_leaves_the_base_out_goes_on_as_one_that_saves_all(runs: TaskRuns) -> None:
    whole = runs.begin(LoRA(), name="run_whole", train=steps(14), checkpoint=ALL)
    assert train(whole) is None
    first = runs.begin(LoRA(), train=steps(5), checkpoint=TRAINABLE)
    assert train(first) is None
    second = runs.begin(LoRA(), after=first, train=steps(14), checkpoint=TRAINABLE)
    assert train(second) is None
    assert {step: losses_of(whole)[step] for step in range(6, 15)}.items() <= losses_of(
        second
    ).items()
    kept, complete = state_of(second), state_of(whole)
    assert kept["model"].keys() == kept["ema"].keys() == complete["model"].keys() - FROZEN
    assert "norm.running_mean" in kept["model"] and kept["frozen"].keys() == FROZEN
    for part in ("model", "ema"):
        assert all(torch.equal(value, complete[part][name]) for name, value in kept[part].items())
    manifests = [ctx.checkpoints.list()[-1] for ctx in (second, whole)]
    assert [manifest.parameters for manifest in manifests] == ["trainable", None]
    weights = CheckpointStore(second.run_dir).read_file(manifests[0].name, "model.pt")
    built = LoRA().build_model()
    missing = built.load_state_dict(torch.load(io.BytesIO(weights)), strict=False)
    assert set(missing.missing_keys) == FROZEN and not missing.unexpected_keys


def test_another_base_is_refused_by_name_when_the_run_goes_on(runs: TaskRuns) -> None:
    first = runs.begin(LoRA(), train=steps(3), checkpoint=TRAINABLE)
    assert train(first) is None
    message = refusal(runs.begin(LoRA(1), after=first, train=steps(5), checkpoint=TRAINABLE))
    assert message.startswith("LoRA.build_model (") and message.endswith("or start a new run")
    assert "with which step 3 was trained: base.weight, tied.weight. No checkpoint" in message


@pytest.mark.parametrize(
    ("parent", "child"), [(TRAINABLE, TRAINABLE), (TRAINABLE, ALL), (ALL, TRAINABLE)]
)
def test_a_fork_merges_with_the_same_base_and_refuses_another(
    parent: dict[str, Any], child: dict[str, Any], runs: TaskRuns
) -> None:
    first = runs.begin(LoRA(), train=steps(5), checkpoint=parent)
    assert train(first) is None
    whole = runs.begin(LoRA(), name="run_whole", train=steps(8), checkpoint=ALL)
    assert train(whole) is None
    origin = {"run_id": first.run_dir.run_id, "step": "latest"}
    more = {"train": steps(8), "checkpoint": child, "resume_from": origin}
    fork = runs.begin(LoRA(), name="run_fork", **more)
    assert train(fork) is None
    kept, complete = state_of(fork)["model"], state_of(whole)["model"]
    assert all(torch.equal(value, complete[name]) for name, value in kept.items())
    assert complete.keys() - kept.keys() == (FROZEN if child is TRAINABLE else set())

    with pytest.raises(StepFailed) as raised:
        train(runs.begin(LoRA(1), name="run_other", **more))
    assert raised.value.error.type == "ForkRefused"
    assert "returned other frozen parameters than run_own/" in raised.value.error.message
    assert "base.weight, tied.weight. With checkpoint" in raised.value.error.message


def _in_place(model: Any) -> None:
    model.base.weight.add_(1)


def _by_data(model: Any) -> None:
    model.base.weight.data += 1


@pytest.mark.parametrize("change", [_in_place, _by_data])
def test_a_base_that_a_hook_changes_is_refused_before_it_is_lost(
    change: Callable[[Any], None], runs: TaskRuns
) -> None:
    class Moving(LoRA):
        def after_step(self, model: Any, step: int) -> None:
            if step == 2:
                change(model)

    ctx = runs.begin(Moving(), train=steps(14), checkpoint=TRAINABLE)
    message = refusal(ctx)
    assert "frozen parameters have changed since the model was built: base.weight" in message
    assert "Set checkpoint.parameters to all" in message
    assert ctx.checkpoints.list() == []


def test_a_base_that_forward_changes_is_refused_at_the_start(runs: TaskRuns) -> None:
    class Forward(LoRA):
        def loss(self, model: Any, batch: Any) -> Any:
            with torch.no_grad():
                model.base.bias.mul_(0.9)
            return super().loss(model, batch)

    ctx = runs.begin(Forward(), train=steps(3), checkpoint=TRAINABLE)
    assert refusal(ctx).startswith("forward changes frozen parameters: base.bias. With checkpoint")
    assert journal_of(ctx).points == []


def test_the_user_s_own_loop_saves_what_it_likes() -> None:
    raw = {"name": "own", "code": {"archive": "sha256:" + "0" * 64, "train_fn": "train:train_fn"}}
    with pytest.raises(ValidationError, match="parameters is trainable, which needs a task"):
        RunSpec.model_validate(raw | {"checkpoint": {"parameters": "trainable"}})
