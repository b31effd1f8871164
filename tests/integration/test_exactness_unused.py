"""Parameters that a micro-batch, a share or a whole global batch does not use: every world size
computes what plain torch does."""

from __future__ import annotations

import io
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness import make_spec
from tests.integration.test_exactness_precision import TRAINEES
from tests.integration.trainees import FIRST_KIND, HeadsByKind, RareHeads, TwoHeads
from tests.support.two_groups import only_in_chaos
from train_fn.recovery.evidence import ErrorKind, describe_error
from train_fn.samples.sampler import Sampler, key

LR, MOMENTUM, DECAY = 0.02, 0.9, 0.01
NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 320, 32, 8
EPOCHS = 2


def heads_spec(momentum: float = MOMENTUM, decay: float = DECAY, unused: str = "zero") -> RunSpec:
    raw = make_spec().model_dump(mode="json")
    train = {
        "epochs": EPOCHS,
        "global_batch_size": GLOBAL_BATCH,
        "micro_batch_size": MICRO_BATCH,
        "loader": {"num_workers": 0},
        "unused_parameters": unused,
    }
    optimizer = {
        "name": "sgd",
        "lr": LR,
        "momentum": momentum,
        "nesterov": False,
        "weight_decay": decay,
    }
    return RunSpec.model_validate(
        raw | {"train": train, "optimizer": optimizer, "schedule": {"name": "constant"}}
    )


def plain_torch(
    task: HeadsByKind, momentum: float = MOMENTUM, decay: float = DECAY, unused: str = "zero"
) -> tuple[dict[int, float], nn.Module]:
    """Losses by steps done and the final model of one loop over whole global batches. With ``zero``
    every head has a gradient, of zero at least."""
    spec = heads_spec(momentum, decay)
    torch.manual_seed(key(spec.train.seed, 6))
    model = task.build_model()
    decays = [
        [p for p in model.parameters() if p.ndim >= 2],
        [p for p in model.parameters() if p.ndim < 2],
    ]
    groups = [
        {"params": params, "weight_decay": of_group}
        for params, of_group in zip(decays, (decay, 0.0), strict=True)
    ]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=momentum)
    x, kinds = task.build_datasets()["train"].tensors
    sampler = Sampler(NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH, spec.train.seed)
    losses = {}
    for step in range(EPOCHS * sampler.steps_per_epoch):
        indices = torch.tensor(sampler.global_batch(*divmod(step, sampler.steps_per_epoch)))
        optimizer.zero_grad(set_to_none=unused == "allow")
        loss = task.loss(model, [x[indices], kinds[indices]])[0] / GLOBAL_BATCH
        if unused == "zero":
            loss = loss + 0.0 * sum(parameter.sum() for parameter in model.parameters())
        loss.backward()
        optimizer.step()
        losses[step + 1] = float(loss.detach())
    return losses, model


@pytest.mark.parametrize(
    ("world_size", "task"),
    [
        (3, "HeadsByKind"),
        (2, "CheckpointedHeads"),
        *only_in_chaos((1, "HeadsByKind"), (2, "HeadsByKind")),
    ],
)
def test_heads_that_only_some_micro_batches_use_learn_the_same_at_every_world_size(
    world_size: int, task: str, tmp_path: Path
) -> None:
    run_dir = make_run_dir(tmp_path)
    store = CheckpointStore(run_dir)
    outcome = train_to_end(
        Job(run_dir, heads_spec(), world_size, setup=f"{TRAINEES}:{task}"), tmp_path
    )

    losses, model = plain_torch(HeadsByKind())
    assert outcome.losses == pytest.approx(losses, rel=1e-5)
    assert_same_weights(store, model)
    assert [epoch["used_once"] for epoch in outcome.of_kind(EventKind.EPOCH_COMPLETED)] == [
        NUM_SAMPLES
    ] * EPOCHS


@pytest.mark.parametrize("world_size", [2, *only_in_chaos(1, 3)])
def test_parameters_that_a_step_does_not_use_are_skipped_where_that_is_allowed(
    world_size: int, tmp_path: Path
) -> None:
    """As by plain torch, whose optimizer leaves alone what has no gradient: no momentum, no decay.
    The first micro-batch need not use all of them, and a restart changes nothing."""
    run_dir, setup = make_run_dir(tmp_path), f"{TRAINEES}:RareHeads"
    spec = heads_spec(unused="allow")
    losses: dict[int, float] = {}
    if world_size == 2:
        [survivor, _] = run_ranks(Job(run_dir, spec, 2, setup=setup, killed=(1, 11)), tmp_path)
        losses = survivor.losses
    attempt = 2 if losses else 1
    outcome = train_to_end(Job(run_dir, spec, world_size, attempt, setup=setup), tmp_path)

    wanted, model = plain_torch(RareHeads(), unused="allow")
    assert losses | outcome.losses == pytest.approx(wanted, rel=1e-5)
    assert_same_weights(CheckpointStore(run_dir), model)
    _, decayed = plain_torch(RareHeads())
    assert not torch.allclose(model.heads[2].weight, decayed.heads[2].weight, rtol=1e-3)  # type: ignore[index,union-attr]


@pytest.mark.parametrize(
    ("world_size", "setup"),
    [
        (3, "two_heads"),
        (2, "two_heads_in_detail"),
        *only_in_chaos((1, "two_heads"), (2, "two_heads")),
    ],
)
def test_a_rank_whose_last_micro_batch_lacks_a_head_computes_what_one_rank_of_torch_does(
    world_size: int, setup: str, tmp_path: Path
) -> None:
    """Plain SGD over two heads. The last rank's last micro-batch of step 12 has one kind alone:
    there a rank once committed gradients that were never exchanged, and lost 16 samples."""
    last = Sampler(NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH, 0).share(
        1, 1, world_size - 1, world_size
    )
    assert set(last[-1].indices) == set(FIRST_KIND)

    run_dir, task = make_run_dir(tmp_path), TwoHeads()
    spec = heads_spec(momentum=0.0, decay=0.0)
    outcome = train_to_end(Job(run_dir, spec, world_size, setup=f"{TRAINEES}:{setup}"), tmp_path)

    losses, model = plain_torch(task, momentum=0.0, decay=0.0)
    assert outcome.losses == pytest.approx(losses, rel=1e-5)
    x, kinds = task.build_datasets()["val"].tensors
    with torch.no_grad():
        val_loss = float(task.loss(model, [x, kinds])[0]) / NUM_SAMPLES
    evaluated = outcome.of_kind(EventKind.EVALUATED)[-1]["metrics"]
    assert evaluated["val_loss"] == pytest.approx(val_loss, rel=1e-5)
    assert_same_weights(CheckpointStore(run_dir), model)
    assert [epoch["used_once"] for epoch in outcome.of_kind(EventKind.EPOCH_COMPLETED)] == [
        NUM_SAMPLES
    ] * EPOCHS


def test_torch_distributed_debug_detail_changes_nothing_of_a_recovery(tmp_path: Path) -> None:
    """Torch's DDP would crash with it over gloo: it is taken for INFO, and the run's user is told
    so."""
    run_dir, setup = make_run_dir(tmp_path), f"{TRAINEES}:two_heads_in_detail"
    spec = heads_spec(momentum=0.0, decay=0.0)
    began = time.monotonic()
    survivor, dead = run_ranks(Job(run_dir, spec, 2, setup=setup, killed=(1, 11)), tmp_path)
    assert time.monotonic() - began < 60
    assert survivor.error is not None and dead.exit_code == -signal.SIGKILL
    [warning] = survivor.of_kind(EventKind.TRAINING_STARTED)[0]["warnings"]
    assert warning.startswith("TORCH_DISTRIBUTED_DEBUG=DETAIL is taken for INFO")
    assert describe_error(survivor.error, 0).kind is ErrorKind.COLLECTIVE
    resumed = train_to_end(Job(run_dir, spec, 2, setup=setup, attempt=2), tmp_path)
    assert resumed.of_kind(EventKind.RESTORED)[0]["source"] == "snapshot"
    losses, _ = plain_torch(TwoHeads(), momentum=0.0, decay=0.0)
    assert survivor.losses | resumed.losses == pytest.approx(losses, rel=1e-5)


def assert_same_weights(store: CheckpointStore, model: nn.Module) -> None:
    """Hold the newest checkpoint's weights against those of ``model``."""
    wanted, newest = model.state_dict(), store.list()[-1].name
    weights = torch.load(io.BytesIO(store.read_file(newest, "model.pt")))
    assert weights.keys() == wanted.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6)
