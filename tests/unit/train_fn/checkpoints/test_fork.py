"""A forked run: it goes on bit for bit where its parent's checkpoint ends, or says why it
cannot."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.manifest import Manifest
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import Storage, open_storage
from storage.run_control import Distrust
from storage.run_dir import RunDir
from tests.integration.trainees import Regression
from tests.support.one_rank import Journal, journal_of, one_rank, small_task_alone
from tests.support.raw_specs import TASK
from tests.support.storage_places import quick_directory
from train_fn.checkpoints.saver import Saver
from train_fn.loop import build
from train_fn.loop.attempt import train
from train_fn.recovery.evidence import StepFailed

pytestmark = [pytest.mark.own_process, pytest.mark.slow]

STEPS_PER_EPOCH = 9
"""Of 90 samples in global batches of 10."""
FORK_STEP = 12


class Wider(Regression):
    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 24), nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 1), nn.Linear(1, 1)
        )


def save_each(self: Saver, *, due: bool, is_best: bool) -> None:
    if is_best or due:
        self.save_now(is_best=is_best)


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One rank, a small task, shared memory of its own, and saves that are not merged: every one is
    made before the next step."""
    with small_task_alone(tmp_path_factory.mktemp("shm"), save_each):
        yield


@pytest.fixture
def storage() -> Iterator[Storage]:
    with quick_directory() as directory:
        yield open_storage(directory)


def spec(resume_from: dict[str, Any] | None = None, **fields: Any) -> RunSpec:
    optimizer = fields.pop("optimizer", {})
    train = {
        "epochs": 2,
        "global_batch_size": 10,
        "micro_batch_size": 4,
        "seed": 3,
        "ema_decay": 0.9,
        "loader": {"num_workers": 0},
    }
    return RunSpec.model_validate(
        {
            "name": "fork",
            "task": TASK,
            "optimizer": {"name": "adamw", "lr": 0.01, **optimizer},
            "train": {**train, **fields.pop("train", {})},
            "checkpoint": {"every_steps": 4, "keep_latest": 9, **fields.pop("checkpoint", {})},
            "resume_from": resume_from,
        }
    )


def run(run_dir: RunDir, wanted: RunSpec, *, submission: int = 1) -> Journal:
    ctx = one_rank(wanted, run_dir, submission=submission, attempt=submission)
    train(ctx)
    return journal_of(ctx)


@pytest.fixture(scope="module")
def trained() -> Iterator[str]:
    """Storage with a run of 18 steps and checkpoints of steps 4, 8, 12, 16 and 18."""
    with quick_directory() as directory:
        run(RunDir(open_storage(directory), "run_parent"), spec())
        yield directory


@pytest.fixture
def parent(trained: str, storage: Storage) -> RunDir:
    """A copy of that run."""
    run_dir = RunDir(storage, "run_parent")
    assert run_dir.local_path is not None
    shutil.copytree(f"{trained}/runs/run_parent", run_dir.local_path)
    return run_dir


@pytest.fixture
def child(parent: RunDir) -> RunDir:
    return RunDir(parent.storage, "run_child")


def fork_of(parent: RunDir, step: int | str = FORK_STEP, **fields: Any) -> RunSpec:
    return spec({"run_id": parent.run_id, "step": step}, **fields)


def checkpoint(run_dir: RunDir, step: int) -> Manifest:
    [found] = [manifest for manifest in CheckpointStore(run_dir).list() if manifest.step == step]
    return found


def load(run_dir: RunDir, manifest: Manifest, file: str) -> Any:
    return torch.load(
        io.BytesIO(CheckpointStore(run_dir).read_file(manifest.name, file)), weights_only=True
    )


def final_state(run_dir: RunDir) -> dict[str, Any]:
    """Everything but clocks and names."""
    manifest = CheckpointStore(run_dir).list()[-1]
    files = {
        name: load(run_dir, manifest, name)
        for name in ("model.pt", "model_ema.pt", "train_state.pt")
    }
    for name in ("parent", "tail", "best"):
        del files["train_state.pt"][name]
    return files


def assert_same(first: Any, second: Any, path: str = "") -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), path
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for name in first:
            assert_same(first[name], second[name], f"{path}/{name}")
    elif isinstance(first, list):
        assert len(first) == len(second), path
        for position, pair in enumerate(zip(first, second, strict=True)):
            assert_same(*pair, f"{path}/{position}")
    else:
        assert first == second, path


def test_a_fork_goes_on_bit_for_bit_where_its_parent_s_checkpoint_ends(
    parent: RunDir, child: RunDir
) -> None:
    journal = run(child, fork_of(parent))
    assert_same(final_state(child), final_state(parent))
    [restored] = journal.of_kind(EventKind.RESTORED)
    name = checkpoint(parent, FORK_STEP).name
    assert (restored["source"], restored["step"], restored["checkpoint"]) == (
        "fork",
        FORK_STEP,
        f"run_parent/{name}",
    )
    assert restored["origin"] == {
        "run_id": "run_parent",
        "checkpoint": name,
        "step": FORK_STEP,
        "epoch": 1,
        "samples": 30,
        "digest": checkpoint(parent, FORK_STEP).sample_digest,
    }
    assert sorted(point["step"] for point in journal.points) == list(
        range(FORK_STEP + 1, 2 * STEPS_PER_EPOCH + 1)
    )
    # what the parent reported is not reported again
    [epoch] = journal.of_kind(EventKind.EPOCH_COMPLETED)
    assert (
        epoch["epoch"],
        epoch["samples"],
        epoch["used_once"],
        epoch["duplicates"],
        epoch["missing"],
    ) == (1, 90, 90, 0, 0)
    first = CheckpointStore(child).list()[0]
    assert (first.step, first.parent) == (FORK_STEP, f"run_parent/{name}")


def test_a_fork_needs_nothing_of_its_parent_once_it_has_a_checkpoint(
    parent: RunDir, child: RunDir
) -> None:
    run(child, fork_of(parent, train={"max_steps": 14}))
    parent.delete()
    journal = run(child, fork_of(parent), submission=2)
    [restored] = journal.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("checkpoint", 14)
    assert "origin" not in restored


def test_what_the_spec_says_anew_holds(parent: RunDir, child: RunDir) -> None:
    wanted = fork_of(
        parent,
        optimizer={"lr": 0.5, "beta1": 0.8},
        train={"epochs": 3, "ema_decay": None, "precision": "bf16"},
    )
    journal = run(child, wanted)
    assert {point["values"]["lr"] for point in journal.points} == {0.5}
    assert max(point["step"] for point in journal.points) == 3 * STEPS_PER_EPOCH
    groups = load(child, CheckpointStore(child).list()[-1], "train_state.pt")["optimizer"][
        "param_groups"
    ]
    assert {group["betas"] for group in groups} == {(0.8, 0.999)}


def test_an_average_that_the_parent_did_not_keep_begins_at_its_weights(storage: Storage) -> None:
    parent, child = RunDir(storage, "run_parent"), RunDir(storage, "run_child")
    run(parent, spec(train={"ema_decay": None, "max_steps": 8}))
    run(child, fork_of(parent, 8, train={"max_steps": 9}))
    first = CheckpointStore(child).list()[0]
    assert first.step == 8
    assert_same(
        load(child, first, "model_ema.pt"),
        load(parent, CheckpointStore(parent).list()[-1], "model.pt"),
    )


def test_the_parent_s_best_does_not_count_but_what_was_measured_where_the_run_begins_does(
    parent: RunDir, child: RunDir
) -> None:
    run(
        child,
        fork_of(
            parent,
            18,
            train={"epochs": 3},
            checkpoint={"best_metric": "loss", "best_mode": "min", "every_steps": 50},
        ),
    )
    assert (
        load(child, CheckpointStore(child).list()[0], "train_state.pt")["best"]["checkpoint"]
        == "step-000000018.s001.a001"
    )
    other = RunDir(parent.storage, "run_other")
    run(
        other,
        fork_of(
            parent,
            16,
            train={"max_steps": 17},
            checkpoint={"best_metric": "loss", "best_mode": "min"},
        ),
    )
    assert load(other, CheckpointStore(other).list()[0], "train_state.pt")["best"] is None


@pytest.mark.parametrize(("which", "step"), [("latest", 18), ("best", 8)])
def test_latest_and_best_without_a_service(storage: Storage, which: str, step: int) -> None:
    parent = RunDir(storage, "run_parent")
    parent.write_spec(spec(checkpoint={"best_metric": "accuracy"}))
    for at, accuracy in ((4, 0.5), (8, 0.9), (18, 0.7)):
        with CheckpointStore(parent).begin(at, 1, 1) as writer:
            with writer.write_file("model.pt") as file:
                file.write(b"x")
            writer.commit(
                epoch=0,
                parent=None,
                world_size=1,
                sample_digest=None,
                metrics={"val_accuracy": accuracy},
            )
    from train_fn.checkpoints.fork import _candidates

    wanted = fork_of(parent, which).resume_from
    assert wanted is not None
    assert [manifest.step for manifest in _candidates(parent, wanted)] == [step]


# ---------------------------------------------------------------- a run's own checkpoints


def spoil(run_dir: RunDir, step: int, file: str) -> str:
    name = checkpoint(run_dir, step).name
    path = Path(CheckpointStore(run_dir).path(name)) / file
    path.write_bytes(path.read_bytes()[:-1])
    return name


def test_a_fork_whose_own_checkpoints_are_all_damaged_begins_again(
    parent: RunDir, child: RunDir
) -> None:
    run(child, fork_of(parent, train={"max_steps": 13}))
    names = [spoil(child, 13, "train_state.pt"), spoil(child, FORK_STEP, "model.pt")]
    journal = run(child, fork_of(parent, train={"max_steps": 13}), submission=2)
    [restored] = journal.of_kind(EventKind.RESTORED)
    assert (restored["source"], [bad["name"] for bad in restored["rejected"]]) == ("fork", names)


# ---------------------------------------------------------------- refusals


def refusal(run_dir: RunDir, wanted: RunSpec) -> str:
    with pytest.raises(StepFailed) as caught:
        run(run_dir, wanted)
    assert caught.value.error.type == "ForkRefused"
    assert CheckpointStore(run_dir).list() == []
    return caught.value.error.message


def test_a_changed_model_is_refused_with_every_key_and_shape(
    parent: RunDir, child: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "build_task", lambda spec: Wider())
    message = refusal(child, fork_of(parent))
    assert "only in this run's model: 4.weight (1, 1), 4.bias (1,)" in message
    assert "0.weight is (16, 4) there and (24, 4) here" in message
    assert "3.weight is (1, 16) there and (1, 24) here" in message
    assert "task.model" in message


def test_another_optimizer_or_global_batch_is_refused(parent: RunDir, child: RunDir) -> None:
    assert "in its settings" in refusal(child, fork_of(parent, optimizer={"name": "sgd"}))
    assert "train.global_batch_size" in refusal(
        child, fork_of(parent, train={"global_batch_size": 15})
    )


def test_a_checkpoint_that_may_hold_wrong_bits_is_refused(parent: RunDir, child: RunDir) -> None:
    parent.distrust(Distrust(1, 1, FORK_STEP - 4))
    assert "states after step 8 may hold wrong bits" in refusal(child, fork_of(parent))
    [restored] = run(child, fork_of(parent, FORK_STEP - 4)).of_kind(EventKind.RESTORED)
    assert restored["step"] == FORK_STEP - 4


def test_a_damaged_or_missing_checkpoint_is_refused_and_not_replaced_by_an_older_one(
    parent: RunDir, child: RunDir
) -> None:
    name = checkpoint(parent, FORK_STEP).name
    path = Path(CheckpointStore(parent).path(name)) / "model.pt"
    path.write_bytes(path.read_bytes()[:-1])
    message = refusal(child, fork_of(parent))
    assert name in message and "model.pt" in message and "another step" in message
    assert "is not there" in refusal(child, fork_of(parent, 11))
    assert "is not there" in refusal(child, spec({"run_id": "run_nobody", "step": 4}))


# ---------------------------------------------------------------- safetensors


def test_safetensors_hold_the_same_weights(storage: Storage) -> None:
    from safetensors.torch import load as load_safetensors

    run_dir = RunDir(storage, "run_a")
    store = CheckpointStore(run_dir)
    run(run_dir, spec(checkpoint={"safetensors": True}, train={"max_steps": 4}))
    manifest = store.list()[-1]
    for name in ("model", "model_ema"):
        found = load_safetensors(store.read_file(manifest.name, f"{name}.safetensors"))
        assert_same(found, load(run_dir, manifest, f"{name}.pt"))


def test_safetensors_of_every_dtype_and_layout() -> None:
    from safetensors.torch import load as load_safetensors

    from train_fn.checkpoints.safetensors_file import require_safetensors, write_safetensors

    state = {
        "half": torch.arange(7).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "phase": torch.randn(3, dtype=torch.complex64),
        "turned": torch.arange(6, dtype=torch.int16).reshape(2, 3).T,
    }
    require_safetensors(state)
    file = io.BytesIO()
    write_safetensors(state, file)
    found = load_safetensors(file.getvalue())
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    asked: list[str] = []

    def value_of(name: str) -> torch.Tensor:
        asked.append(name)
        return state[name]

    shapes = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
    write_safetensors(shapes, again := io.BytesIO(), value_of)
    assert again.getvalue() == file.getvalue() and sorted(asked) == sorted(state)
    wide = {"wide": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(Exception, match=r"does not hold wide, extra"):
        require_safetensors({**wide, "extra": {"version": 1}})
    with pytest.raises(ValueError, match=r"cannot hold wide, which is .*128; read the .pt files"):
        write_safetensors(wide, io.BytesIO())
