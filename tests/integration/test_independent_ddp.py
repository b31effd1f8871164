"""The losses of every global batch agree with those of a plain DDP script that shares no code with
Everstep."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

from everstep.spec.run_spec import RunSpec
from tests.integration.ranks import Job, make_run_dir, train_to_end
from tests.support.two_groups import only_in_chaos
from train_fn.models import MiniResNet
from train_fn.samples.sampler import Sampler, key

SCRIPT = Path(__file__).with_name("independent_ddp.py")
NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH, EPOCHS, SEED = 1797, 128, 32, 2, 7
SPEC = RunSpec.model_validate(
    {
        "name": "independent",
        "task": {
            "name": "image_classification",
            "model": {"name": "mini_resnet"},
            "data": {"name": "digits", "args": {"val_fraction": 0.0, "augment": False}},
        },
        "optimizer": {"name": "sgd", "lr": 0.002, "momentum": 0.5, "weight_decay": 0.01},
        "train": {
            "epochs": EPOCHS,
            "global_batch_size": GLOBAL_BATCH,
            "micro_batch_size": MICRO_BATCH,
            "grad_clip_norm": 1.0,
            "seed": SEED,
        },
    }
)


def write_inputs(directory: Path) -> None:
    """The data order, and the weights that a run with this seed starts from."""
    sampler = Sampler(NUM_SAMPLES, GLOBAL_BATCH, MICRO_BATCH, SEED)
    batches = [
        sampler.global_batch(epoch, k).tolist()
        for epoch in range(EPOCHS)
        for k in range(sampler.steps_per_epoch)
    ]
    for epoch in (batches[:15], batches[15:]):
        assert sorted(chain.from_iterable(epoch)) == list(range(NUM_SAMPLES))
    (directory / "order.json").write_text(json.dumps(batches))
    torch.manual_seed(key(SEED, 6))
    torch.save(MiniResNet(SPEC.task.model.args, 1, 10, 8).state_dict(), directory / "initial.pt")


def independent_losses(directory: Path, world_size: int) -> list[float]:
    write_inputs(directory)
    files = [str(directory / name) for name in ("order.json", "initial.pt", "losses.json")]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # What torchrun sets, without its start-up time.
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *files], env={**os.environ, **shared, "RANK": str(rank)}
        )
        for rank in range(world_size)
    ]
    try:
        assert [rank.wait(timeout=200) for rank in ranks] == [0] * world_size
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    losses: list[float] = json.loads(Path(files[-1]).read_text())
    return losses


@pytest.mark.parametrize("world_size", [2, *only_in_chaos(1, 3)])
def test_losses_agree_with_a_plain_ddp_script(world_size: int, tmp_path: Path) -> None:
    expected = independent_losses(tmp_path, world_size)
    found = train_to_end(Job(make_run_dir(tmp_path), SPEC, world_size), tmp_path).losses
    assert len(expected) == 30
    assert [found[step] for step in range(1, 31)] == pytest.approx(expected, rel=5e-5)
    # both learn, so that agreeing means something; slowly, so that rounding does not grow
    assert expected[-1] < 0.9 * expected[0]
