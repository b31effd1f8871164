"""Ranks that draw while they build: all draw alike from what Everstep seeds, and what differs all
the same is refused by name."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from tests.integration.ranks import Job, Outcome, make_run_dir, run_ranks, train_to_end
from tests.support.raw_specs import TASK
from tests.support.service_process import free_port
from train_fn.recovery.evidence import StepFailed

HERE = "tests.integration.builders"


def make_spec(**train: object) -> RunSpec:
    loader = {"num_workers": 0}
    settings = {
        "global_batch_size": 12,
        "micro_batch_size": 4,
        "epochs": 1,
        "max_steps": 3,
        "seed": 5,
        "loader": loader,
        **train,
    }
    return RunSpec.model_validate(
        {
            "name": "built",
            "task": TASK,
            "train": settings,
            "scaling": {"max_workers": 3, "use_gpu": False},
        }
    )


def errors(outcomes: list[Outcome]) -> set[str]:
    """What ranks said themselves, without those that a peer's end took along."""
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert all(isinstance(error, StepFailed) for error in failed), failed
    return {error.error.summary for error in failed if isinstance(error, StepFailed)}


def test_draws_from_the_global_generators_are_the_same_on_every_rank_and_at_every_size(
    tmp_path: Path,
) -> None:
    measured = {}
    for world_size in (1, 2, 3):
        job = Job(
            make_run_dir(tmp_path, f"run_{world_size}"),
            make_spec(),
            world_size,
            setup=f"{HERE}:own_split",
        )
        [evaluated] = train_to_end(job, tmp_path).of_kind(EventKind.EVALUATED)
        assert evaluated["metrics"]["val_leaked"] == 0.0, (
            f"of {world_size} ranks some train on others' validation samples"
        )
        measured[world_size] = evaluated["metrics"]["val_loss"]
    assert measured[2] == pytest.approx(measured[1], rel=1e-5) and measured[3] == pytest.approx(
        measured[1], rel=1e-5
    )


def test_weights_do_not_depend_on_what_was_drawn_for_the_data(tmp_path: Path) -> None:
    losses = []
    for number, setup in enumerate(("own_split", "greedy_data")):
        job = Job(make_run_dir(tmp_path, f"run_{number}"), make_spec(), 2, setup=f"{HERE}:{setup}")
        losses.append(train_to_end(job, tmp_path).losses)
    assert losses[0] == losses[1] and all(map(math.isfinite, losses[0].values()))


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ("split_by_own_generator", "rank 1 has another train sample 0, train sample"),
        ("other_validation", "rank 1 has another validation sample 3 than rank 0"),
        ("other_weights", "built another model on rank 1 than on rank 0: `3.bias` is not the same"),
        ("other_table", "built another model on rank 1 than on rank 0: `table` is not the same"),
    ],
)
def test_what_differs_over_ranks_is_named_before_a_step(
    tmp_path: Path, setup: str, words: str
) -> None:
    outcomes = run_ranks(
        Job(make_run_dir(tmp_path), make_spec(), 2, setup=f"{HERE}:{setup}"), tmp_path
    )
    [said] = errors(outcomes)
    assert words in said and "train.seed" in said and "PYTHONHASHSEED" not in said, said
    assert not outcomes[0].losses


def test_samples_that_are_augmented_by_a_generator_of_their_own_are_not_refused(
    tmp_path: Path,
) -> None:
    job = Job(make_run_dir(tmp_path), make_spec(), 2, setup=f"{HERE}:own_noise")
    assert len(train_to_end(job, tmp_path).losses) == 3


def test_weights_that_a_state_brings_may_be_built_differently_but_not_what_it_does_not_hold(
    tmp_path: Path,
) -> None:
    run_dir, plain = make_run_dir(tmp_path), "tests.integration.trainees:regression"
    train_to_end(Job(run_dir, make_spec(), 2, stopped=("pause", 0), setup=plain), tmp_path)
    refused = run_ranks(
        Job(run_dir, make_spec(), 2, attempt=2, setup=f"{HERE}:other_table"), tmp_path
    )
    [said] = errors(refused)
    assert "`table` is kept by no state, and is not the same" in said
    resumed = train_to_end(
        Job(run_dir, make_spec(), 2, attempt=3, setup=f"{HERE}:other_weights"), tmp_path
    )
    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"], max(resumed.losses)) == ("checkpoint", 1, 3)


FROM_A_SET = """
import torch
from torch import nn

class Words:
    def build_model(self):
        return nn.Linear(1, 1)

    def build_datasets(self):
        words = {str(number) for number in range(40)}
        return {"train": [(torch.ones(1), int(word)) for word in words], "val": None}

    def loss(self, model, batch):
        x, y = batch
        return (model(x)[:, 0] - y).square().sum(), len(y)
"""


def start_rank(rank: int, directory: Path, port: int, **env: str) -> subprocess.Popen[str]:
    """A rank as torchrun starts it, in an interpreter of its own."""
    places = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [
        sys.executable,
        "-m",
        "train_fn.standalone",
        "--code",
        str(directory / "code"),
        "--task",
        "task:Words",
    ]
    command += ["--storage", str(directory / "storage"), "--run-id", f"words-{os.getpid()}-{port}"]
    for setting in (
        "train.max_steps=2",
        "train.global_batch_size=8",
        "train.loader.num_workers=0",
        "scaling.max_workers=2",
    ):
        command += ["--set", setting]
    return subprocess.Popen(
        command,
        env=inherited | places | meeting | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("seeds", [None, ("7", "8")])
def test_data_from_a_set_is_the_same_on_ranks_of_interpreters_of_their_own(
    tmp_path: Path, seeds: tuple[str, str] | None
) -> None:
    """Each begins again with one hash seed; where the seeds were chosen and differ, that is named
    as the likely cause."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "task.py").write_text(FROM_A_SET)
    port = free_port()
    ranks = [
        start_rank(rank, tmp_path, port, **({"PYTHONHASHSEED": seeds[rank]} if seeds else {}))
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    if seeds is None:
        assert [rank.returncode for rank in ranks] == [0, 0], said
    else:
        assert all(
            "rank 1 has another train sample" in out
            and "set PYTHONHASHSEED=0 where nodes are" in out
            for out in said
        ), said
