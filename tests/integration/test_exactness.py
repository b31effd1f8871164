"""Interrupted == uninterrupted: bit for bit at equal world size, to float tolerance across world
sizes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from tests.integration.ranks import Job, Outcome, make_run_dir, run_ranks, train_to_end
from tests.support.two_groups import only_in_chaos
from train_fn.node.node_dir import shared_memory_root
from train_fn.recovery.evidence import StepFailed, describe_error

STEPS_PER_EPOCH = 15
"""Of 1,437 samples in global batches of 100: the last one has 37."""
LAST_STEP = 2 * STEPS_PER_EPOCH


def make_spec(norm: str = "group", **train: Any) -> RunSpec:
    """Two epochs of everything that has state or randomness; 100 samples are seven micro-batches of
    16, the last one of 4."""
    return RunSpec.model_validate(
        {
            "name": "exactness",
            "task": {
                "name": "image_classification",
                "model": {
                    "name": "mini_resnet",
                    "args": {"width": 8, "blocks_per_stage": 1, "norm": norm, "dropout": 0.2},
                },
                "data": {"name": "digits"},
            },
            "optimizer": {"name": "adamw", "lr": 0.003, "weight_decay": 0.01},
            "schedule": {"name": "cosine", "warmup_steps": 5},
            "train": {
                "epochs": 2,
                "global_batch_size": 100,
                "micro_batch_size": 16,
                "grad_clip_norm": 1.0,
                "ema_decay": 0.9,
                **train,
            },
            "checkpoint": {"every_steps": 10, "best_metric": "none"},
        }
    )


def final_state(run_dir: RunDir) -> dict[str, Any]:
    """Model and training state of the newest checkpoint, without what may differ: clocks, and the
    attempt in a checkpoint's name."""
    store = CheckpointStore(run_dir)
    manifest = store.list()[-1]
    assert manifest.step == LAST_STEP
    files = {
        name: torch.load(io.BytesIO(store.read_file(manifest.name, name)))
        for name in manifest.files
    }
    for name in ("parent", "tail"):
        del files["train_state.pt"][name]
    (files["train_state.pt"]["best"] or {}).pop("checkpoint", None)
    return files


def assert_same(first: Any, second: Any, path: str = "") -> None:
    """Equal in every bit."""
    assert type(first) is type(second), path
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), f"{path} differs by up to {(first - second).abs().max()}"
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for name in first:
            assert_same(first[name], second[name], f"{path}/{name}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), path
        for position, pair in enumerate(zip(first, second, strict=True)):
            assert_same(*pair, f"{path}/{position}")
    else:
        assert first == second, path


def merged_losses(*outcomes: Outcome) -> dict[int, float]:
    """Losses of every step over attempts; a step that two attempts report has one loss."""
    merged: dict[int, float] = {}
    for outcome in outcomes:
        for step, loss in outcome.losses.items():
            assert merged.setdefault(step, loss) == loss
    return merged


@pytest.mark.parametrize(
    ("world_size", "norm"),
    [(2, "group"), (3, "batch"), *only_in_chaos((1, "batch"), (2, "batch"))],
)
def test_resumed_from_a_checkpoint_is_bitwise_the_same(
    world_size: int, norm: str, tmp_path: Path
) -> None:
    whole, parts = make_run_dir(tmp_path, "run_whole"), make_run_dir(tmp_path, "run_parts")
    spec = make_spec(norm)
    reference = train_to_end(Job(whole, spec, world_size), tmp_path)

    first = train_to_end(Job(parts, spec, world_size, stopped=("pause", 6)), tmp_path)
    second = train_to_end(
        Job(parts, spec, world_size, submission=2, stopped=("pause", STEPS_PER_EPOCH - 1)), tmp_path
    )
    third = train_to_end(Job(parts, spec, world_size, submission=3), tmp_path)

    assert [outcome.stop for outcome in (first, second, third)] == ["pause", "pause", None]
    [restored] = third.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"], restored["checkpoint"]) == (
        "checkpoint",
        15,
        "step-000000015.s002.a001",
    )
    assert merged_losses(first, second, third) == reference.losses
    assert_same(final_state(whole), final_state(parts))


@pytest.mark.parametrize(
    ("world_size", "killed_rank"),
    [
        pytest.param(2, 0, marks=pytest.mark.core),
        pytest.param(5, 2, marks=pytest.mark.core),
        *only_in_chaos((2, 1), (3, 1)),
    ],
)
def test_survivors_of_a_killed_rank_lose_no_step(
    world_size: int, killed_rank: int, tmp_path: Path
) -> None:
    whole, broken = make_run_dir(tmp_path, "run_whole"), make_run_dir(tmp_path, "run_broken")
    spec = make_spec("batch")
    reference = train_to_end(Job(whole, spec, world_size), tmp_path)

    outcomes = run_ranks(Job(broken, spec, world_size, killed=(killed_rank, 13)), tmp_path)
    for rank, outcome in enumerate(outcomes):
        if rank == killed_rank:
            assert outcome.exit_code == -9
            continue
        assert isinstance(outcome.error, StepFailed)
        assert outcome.error.error.snapshot_step in (13, 14)
        assert describe_error(outcome.error, rank).kind is ErrorKind.COLLECTIVE
    resumed = train_to_end(Job(broken, spec, world_size, attempt=2), tmp_path)

    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert restored["source"] == "snapshot"
    assert restored["step"] >= 13
    assert restored["rejected"] == []
    assert merged_losses(outcomes[0], resumed) == reference.losses
    assert_same(final_state(whole), final_state(broken))
    assert not (shared_memory_root() / broken.run_id).exists()


def test_another_world_size_agrees_to_float_tolerance(tmp_path: Path) -> None:
    whole, shrunk = make_run_dir(tmp_path, "run_whole"), make_run_dir(tmp_path, "run_shrunk")
    spec = make_spec("group")
    reference = train_to_end(Job(whole, spec, 1), tmp_path)

    three = run_ranks(Job(shrunk, spec, 3, killed=(2, 8)), tmp_path)
    two = run_ranks(Job(shrunk, spec, 2, attempt=2, killed=(0, 19)), tmp_path)
    one = train_to_end(Job(shrunk, spec, 1, attempt=3), tmp_path)

    # Of attempt 2 rank 0 died with what it had reported; the survivor's state still holds its last
    # steps.
    losses = merged_losses(three[0], one) | two[0].losses
    assert losses.keys() == reference.losses.keys()
    for step, loss in reference.losses.items():
        assert losses[step] == pytest.approx(loss, rel=2e-3, abs=1e-4), step
    expected, found = final_state(whole), final_state(shrunk)
    assert found["train_state.pt"]["ledger"] == expected["train_state.pt"]["ledger"]
    for name, tensor in expected["model.pt"].items():
        torch.testing.assert_close(found["model.pt"][name], tensor, rtol=1e-2, atol=1e-3)
