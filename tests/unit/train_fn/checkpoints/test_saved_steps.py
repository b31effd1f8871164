"""The whole loop, saving as fast as it can: every checkpoint is the state after its step, and a
resume goes on from it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.integration.trainees import Regression
from tests.support.one_rank import journal_of, one_rank
from tests.support.storage_places import quick_directory
from train_fn.checkpoints.commit import load_checkpoint
from train_fn.checkpoints.saver import Saver
from train_fn.loop import build
from train_fn.loop.attempt import train
from train_fn.node import node_dir
from train_fn.snapshots import store as snapshot_module
from train_fn.state.tensor_tree import digest

pytestmark = pytest.mark.own_process

STEPS = 45
"""Five epochs of 90 samples in global batches of 10."""
SETTLED_EVERY_STEPS = 5
"""Between these steps the disk says how many saves are merged into a later one."""


class Normalised(Regression):
    """With buffers that every forward pass changes, and moments, averages and a held-out set beside
    them."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 300),
            nn.BatchNorm1d(300),
            nn.Dropout(0.1),
            nn.Linear(300, 300),
            nn.Linear(300, 1),
        )


@pytest.fixture(autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path_factory.mktemp("shm")
    for module in (snapshot_module, node_dir):
        monkeypatch.setattr(module, "shared_memory_root", lambda: root)
    monkeypatch.setattr(build, "build_task", lambda spec: Normalised())


def digest_of(state: dict[str, Any]) -> str:
    """Of averages those of weights alone: their file also holds the model's buffers, so that a
    model can load it as it is."""
    buffers = {name for name in state["model"] if "running" in name or "tracked" in name}
    return digest(
        {
            **state,
            "ema": {name: value for name, value in state["ema"].items() if name not in buffers},
        }
    )


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Of the live state at every boundary, as it is at the moment at which a save is offered."""
    found: dict[int, str] = {}
    offer = Saver.offer

    def note_and_offer(self: Saver, *, due: bool, is_best: bool) -> None:
        now = digest_of(self._state.state_dict())
        assert found.setdefault(self._state.step, now) == now, (
            f"step {self._state.step} is another one than it was before"
        )
        offer(self, due=due, is_best=is_best)
        if self._state.step % SETTLED_EVERY_STEPS == 0:
            assert self.wait_idle(time.monotonic() + 60)

    monkeypatch.setattr(Saver, "offer", note_and_offer)
    return found


@pytest.fixture
def run_dir() -> Iterator[RunDir]:
    with quick_directory() as directory:
        yield RunDir(open_storage(directory), "run_saved")


def run(run_dir: RunDir, submission: int) -> dict[str, object]:
    """Train to the end; where it began."""
    wanted = RunSpec.model_validate(
        {
            "name": "saved",
            "task": {
                "name": "image_classification",
                "model": {"name": "mini_resnet"},
                "data": {"name": "digits"},
            },
            "optimizer": {"name": "adamw", "lr": 0.01},
            "schedule": {"name": "cosine", "warmup_steps": 5},
            "train": {
                **{
                    "epochs": 5,
                    "global_batch_size": 10,
                    "micro_batch_size": 4,
                    "ema_decay": 0.9,
                    "loader": {"num_workers": 0},
                },
                "grad_clip_norm": 1.0,
            },
            "checkpoint": {
                "every_steps": 1,
                "keep_latest": 1000,
                "best_metric": "val_loss",
                "best_mode": "min",
            },
        }
    )
    ctx = one_rank(wanted, run_dir, submission=submission, attempt=submission)
    assert train(ctx) is None
    [restored] = journal_of(ctx).of_kind(EventKind.RESTORED)
    return restored


@pytest.mark.slow
def test_every_checkpoint_is_the_state_after_its_step_and_a_resume_repeats_no_other(
    run_dir: RunDir, digests: dict[int, str]
) -> None:
    run(run_dir, 1)
    store = CheckpointStore(run_dir)
    written = store.list()
    assert (
        written[-1].step == STEPS == max(digests) and len(written) >= STEPS // SETTLED_EVERY_STEPS
    )
    for manifest in written:
        assert digest_of(load_checkpoint(run_dir, manifest)) == digests[manifest.step], (
            manifest.name
        )

    middle = next(manifest for manifest in written if manifest.step >= STEPS // 2)
    for manifest in written[written.index(middle) + 1 :]:
        store.delete(manifest.name)
    restored = run(run_dir, 2)  # the digests say that it takes the same steps once more
    assert (restored["source"], restored["step"]) == ("checkpoint", middle.step)
    for manifest in store.list():
        assert digest_of(load_checkpoint(run_dir, manifest)) == digests[manifest.step], (
            manifest.name
        )
