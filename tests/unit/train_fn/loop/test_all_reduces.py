"""What goes over the wire, by counts: one synchronisation a step whatever its micro-batches, begun
while backward still runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from everstep.spec.run_spec import RunSpec
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.one_rank import one_rank
from train_fn.context import WorkerContext
from train_fn.loop import attempt
from train_fn.loop.replica import wrap
from train_fn.loop.training import RankProgress, Training
from train_fn.standalone.rank import begin_run
from train_fn.step.peers import end_process_group

pytestmark = [pytest.mark.own_process, pytest.mark.slow]


@pytest.fixture(autouse=True)
def process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    end_process_group()
    torch.use_deterministic_algorithms(False)


@dataclasses.dataclass
class Traffic:
    """What DDP handed over to be added up."""

    num_all_reduces: int = 0
    ready_at_first: list[int] = dataclasses.field(default_factory=list)
    """Parameters whose gradient was there when a step's first bucket went out."""
    num_ready: int = 0


def train_counted(spec: RunSpec, tmp_path: Path) -> tuple[Traffic, int]:
    """Train by the loop itself, wrapped as for several ranks, with a hook on every bucket; the
    traffic and number of parameters."""
    run_dir = RunDir(
        open_storage(str(tmp_path)), f"run{spec.train.max_steps}-{spec.train.global_batch_size}"
    )
    start = begin_run(run_dir, spec, "test", fresh=True)
    ctx = one_rank(spec, run_dir, submission=start.submission, attempt=start.attempt)
    traffic = Traffic()

    def add_up(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations, and takes no text for them
        state.num_all_reduces += 1
        if bucket.index() == 0:
            state.ready_at_first.append(state.num_ready)
        if bucket.is_last():
            state.num_ready = 0
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def count_ready(parameter: torch.Tensor) -> None:
        traffic.num_ready += 1

    def prepare_wrapped(ctx: WorkerContext, progress: RankProgress) -> Training:
        training = prepare(ctx, progress)
        replica = training.replica
        replica.wrapped = wrapped = wrap(replica.step_module, torch.device("cpu"))
        wrapped.register_comm_hook(traffic, add_up)
        for parameter in replica.parameters:
            parameter.register_post_accumulate_grad_hook(count_ready)
        return training

    prepare = attempt.prepare
    progress = RankProgress()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempt, "prepare", prepare_wrapped)
        attempt.train_openly(ctx, progress)
    assert progress.replica is not None
    return traffic, len(progress.replica.parameters)


def make_spec(tmp_path: Path, width: int = 16, **train: Any) -> RunSpec:
    (tmp_path / "text.txt").write_text("some text to train on, again and again. " * 200)
    model = {"num_layers": 4, "num_heads": 2, "width": width, "context_length": 8}
    return RunSpec.model_validate(
        {
            "name": "counted",
            "task": {
                "name": "language_modeling",
                "model": {"name": "gpt", "args": model},
                "data": {
                    "name": "text_files",
                    "args": {"path": str(tmp_path / "text.txt"), "val_fraction": 0},
                },
            },
            "train": train,
            "checkpoint": {"every_steps": None},
        }
    )


def test_twice_the_micro_batches_a_step_halve_the_all_reduces(tmp_path: Path) -> None:
    """64 micro-batches of 4 sequences, in steps of 4, 8 and 16 of them."""
    counts = []
    for num_micro in (4, 8, 16):
        spec = make_spec(
            tmp_path, global_batch_size=4 * num_micro, micro_batch_size=4, max_steps=64 // num_micro
        )
        counts.append(train_counted(spec, tmp_path)[0].num_all_reduces)
    assert counts == [16, 8, 4], "one bucket, once a step"


def test_smaller_micro_batches_cost_no_further_all_reduce(tmp_path: Path) -> None:
    for size in (16, 8, 4):
        spec = make_spec(tmp_path, global_batch_size=16, micro_batch_size=size, max_steps=5)
        assert train_counted(spec, tmp_path)[0].num_all_reduces == 5


def test_a_model_of_one_bucket_is_exchanged_by_one_all_reduce(tmp_path: Path) -> None:
    # 13 MB of gradients
    spec = make_spec(tmp_path, width=256, global_batch_size=4, micro_batch_size=4, max_steps=3)
    assert train_counted(spec, tmp_path)[0].num_all_reduces == 3, (
        "on CPU ranks the first bucket is as large as the others"
    )


def test_the_first_bucket_goes_out_while_backward_has_most_of_its_work_before_it(
    tmp_path: Path,
) -> None:
    spec = make_spec(tmp_path, width=768, global_batch_size=4, micro_batch_size=4, max_steps=3)
    traffic, num_parameters = train_counted(spec, tmp_path)
    # The first step's one bucket follows the order of the parameters; then DDP cuts by the order in
    # which backward went.
    assert traffic.num_all_reduces == 1 + 2 * 5
    assert all(0 < ready <= num_parameters // 2 for ready in traffic.ready_at_first[1:])
