"""Parameters that a micro-batch, a share or a whole global batch does not use: every world size
computes what plain torch does."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from tests.integration.ranks import Job, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness import make_spec
from tests.integration.test_exactness_precision import TRAINEES
from tests.integration.trainees import HeadsByKind
from train_fn.samples.randomness import key
from train_fn.samples.sampler import Sampler

LR, MOMENTUM, DECAY = 0.02, 0.9, 0.01
NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 320, 32, 8
EPOCHS = 2


def heads_spec() -> RunSpec:
    raw = make_spec().model_dump(mode="json")
    train = {
        "epochs": EPOCHS,
        "global_batch_size": GLOBAL_BATCH,
        "micro_batch_size": MICRO_BATCH,
        "loader": {"num_workers": 0},
    }
    optimizer = {
        "name": "sgd",
        "lr": LR,
        "momentum": MOMENTUM,
        "nesterov": False,
        "weight_decay": DECAY,
    }
    return RunSpec.model_validate(
        raw | {"train": train, "optimizer": optimizer, "schedule": {"name": "constant"}}
    )


def plain_torch() -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Losses by steps done and final weights of one loop over whole global batches: every head has
    a gradient, of zero at least."""
    task, spec = HeadsByKind(), heads_spec()
    torch.manual_seed(key(spec.train.seed, 6))
    model = task.build_model()
    decays = [
        [p for p in model.parameters() if p.ndim >= 2],
        [p for p in model.parameters() if p.ndim < 2],
    ]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in zip(decays, (DECAY, 0.0), strict=True)
    ]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM)
    x, kinds = task.build_datasets()["train"].tensors
    sampler = Sampler(NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH, spec.train.seed)
    losses = {}
    for step in range(EPOCHS * sampler.steps_per_epoch):
        indices = torch.tensor(sampler.global_batch(*divmod(step, sampler.steps_per_epoch)))
        optimizer.zero_grad(set_to_none=False)
        loss = task.loss(model, [x[indices], kinds[indices]])[0] / GLOBAL_BATCH
        loss = loss + 0.0 * sum(parameter.sum() for parameter in model.parameters())
        loss.backward()
        optimizer.step()
        losses[step + 1] = float(loss.detach())
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("world_size", "task"),
    [(1, "heads_by_kind"), (2, "heads_by_kind"), (3, "heads_by_kind"), (2, "checkpointed_heads")],
)
def test_heads_that_only_some_micro_batches_use_learn_the_same_at_every_world_size(
    world_size: int, task: str, tmp_path: Path
) -> None:
    run_dir = make_run_dir(tmp_path)
    store = CheckpointStore(run_dir)
    outcome = train_to_end(
        Job(run_dir, heads_spec(), world_size, setup=f"{TRAINEES}:{task}"), tmp_path
    )

    losses, weights = plain_torch()
    assert outcome.losses == pytest.approx(losses, rel=1e-5)
    newest = store.list()[-1].name
    for name, tensor in torch.load(io.BytesIO(store.read_file(newest, "model.pt"))).items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-6)
    assert [epoch["used_once"] for epoch in outcome.of_kind(EventKind.EPOCH_COMPLETED)] == [
        NUM_SAMPLES
    ] * EPOCHS


def test_ranks_that_lose_a_peer_go_on_with_the_same_values(tmp_path: Path) -> None:
    """Also over the boundary where the exchange of one rank is completed late."""
    run_dir, setup = make_run_dir(tmp_path), f"{TRAINEES}:heads_by_kind"
    survivors = run_ranks(Job(run_dir, heads_spec(), 2, setup=setup, killed=(1, 11)), tmp_path)
    resumed = train_to_end(Job(run_dir, heads_spec(), 3, setup=setup, attempt=2), tmp_path)
    assert survivors[0].losses | resumed.losses == pytest.approx(plain_torch()[0], rel=1e-5)
