"""Buffers and other untrained tensors that forward passes move: at every world size what plain
torch makes of the rule."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.run_dir import RunDir
from tests.integration.moving_buffers import (
    NUM_STEPS,
    SPEC,
    MovingTask,
    plain_run,
    plain_val_loss,
    tensors_of,
)
from tests.integration.ranks import Job, Outcome, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness import assert_same
from tests.support.two_groups import only_in_chaos
from train_fn.recovery.evidence import StepFailed
from train_fn.samples.sampler import key

SETUP = "tests.integration.moving_buffers:MovingTask"


def first_model() -> torch.nn.Module:
    torch.manual_seed(key(SPEC.train.seed, 6))
    return MovingTask().build_model()


def saved(run_dir: RunDir) -> dict[str, torch.Tensor]:
    store = CheckpointStore(run_dir)
    manifest = store.list()[-1]
    assert manifest.step == NUM_STEPS
    found: dict[str, torch.Tensor] = torch.load(
        io.BytesIO(store.read_file(manifest.name, "model.pt"))
    )
    return found


def val_losses(*outcomes: Outcome) -> list[float]:
    return [
        data["metrics"]["val_loss"]
        for outcome in outcomes
        for data in outcome.of_kind(EventKind.EVALUATED)
    ]


@pytest.mark.parametrize("world_size", [1, 3, *only_in_chaos(2, 4)])
def test_statistics_and_evaluations_are_those_of_plain_torch_at_every_world_size(
    world_size: int, tmp_path: Path
) -> None:
    run_dir = make_run_dir(tmp_path)
    outcome = train_to_end(Job(run_dir, SPEC, world_size, setup=SETUP), tmp_path)
    found = saved(run_dir)
    model = plain_run(first_model(), NUM_STEPS)
    right = {name: tensor for name, tensor in tensors_of(model).items() if name in found}
    assert right.keys() == found.keys()
    for name, tensor in right.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(
                found[name],
                tensor,
                rtol=1e-4,
                atol=1e-5,
                msg=lambda text, name=name: f"{name}: {text}",
            )
        else:
            assert found[name].tolist() == tensor.tolist(), name
    assert int(found["norm.num_batches_tracked"]) == NUM_STEPS
    assert val_losses(outcome)[-1] == pytest.approx(plain_val_loss(model), rel=1e-4)


@pytest.mark.parametrize(
    ("world_size", "killed"),
    [
        (2, (0, 5)),
        *only_in_chaos((2, (1, 3)), (3, (1, 4))),
    ],
)
def test_what_moves_is_torn_by_no_failure(
    world_size: int, killed: tuple[int, int], tmp_path: Path
) -> None:
    """The restart is bit for bit the same."""
    whole, broken = make_run_dir(tmp_path, "run_whole"), make_run_dir(tmp_path, "run_broken")
    reference = train_to_end(Job(whole, SPEC, world_size, setup=SETUP), tmp_path)
    outcomes = run_ranks(Job(broken, SPEC, world_size, killed=killed, setup=SETUP), tmp_path)
    errors: list[Any] = [
        outcome.error for rank, outcome in enumerate(outcomes) if rank != killed[0]
    ]
    for error in errors:
        assert isinstance(error, StepFailed)
        assert (error.error.snapshot_step, error.snapshot_problem) == (killed[1], None)
    resumed = train_to_end(Job(broken, SPEC, world_size, attempt=2, setup=SETUP), tmp_path)
    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("snapshot", killed[1])
    assert_same(saved(whole), saved(broken))
    assert val_losses(resumed)[-1] == val_losses(reference)[-1]
