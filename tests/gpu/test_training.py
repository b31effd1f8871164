"""The loop on a GPU: it learns in every precision, goes on where it was, keeps its inputs pinned
and its copies beside the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from tests.support.raw_specs import TASK
from train_fn.samples.loader import KeyedDataset, Loader
from train_fn.samples.sampler import MicroBatch
from train_fn.standalone.command import run_local
from train_fn.state.tensor_tree import copy_to_cpu


def make_spec(**train: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "gpu",
            "task": TASK,
            "optimizer": {"name": "adamw", "lr": 3e-3},
            "train": {
                "epochs": 6,
                "global_batch_size": 128,
                "micro_batch_size": 32,
                "ema_decay": 0.9,
                "grad_clip_norm": 1.0,
                **train,
            },
            "scaling": {"use_gpu": True},
        }
    )


def events(run_dir: RunDir, kind: EventKind) -> list[dict[str, Any]]:
    return [
        event.data
        for event in read_journal(run_dir, run_dir.submissions()[-1], None, 5000)[0]
        if event.kind is kind
    ]


@pytest.mark.parametrize(
    "train",
    [{}, {"precision": "bf16"}, {"precision": "fp16"}, {"precision": "bf16", "compile": True}],
)
def test_it_learns_over_nccl_in_every_precision(train: dict[str, Any], tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert run_local(make_spec(**train), storage.uri, "run").code == 0
    run_dir = RunDir(storage, "run")
    [started] = events(run_dir, EventKind.TRAINING_STARTED)
    assert (started["device"], started["backend"]) == ("cuda:0", "nccl")
    assert events(run_dir, EventKind.EVALUATED)[-1]["metrics"]["val_accuracy"] > 0.8


def test_micro_batches_come_pinned_and_are_copied_ahead(nccl: torch.device) -> None:
    class Images(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((3, 64, 64), index, dtype=torch.uint8)

    dataset = KeyedDataset(Images(), 0, default_collate, training=True)
    keys = [MicroBatch(0, number, np.arange(2 * number, 2 * number + 2)) for number in range(4)]
    loader = Loader(dataset, keys, make_spec(loader={"num_workers": 1}), 1, nccl)
    for number in range(4):
        loader.prefetch()
        loader.prefetch()  # asked twice, one is ahead
        indices, batch, _ = next(loader)
        assert indices.tolist() == [2 * number, 2 * number + 1]
        assert batch.device == nccl
        assert batch[:, 0, 0, 0].tolist() == indices.tolist()
    loader.prefetch()
    with pytest.raises(StopIteration):
        next(loader)
    loader.close()


def test_copies_of_the_state_lie_in_pinned_memory_that_is_used_again(nccl: torch.device) -> None:
    tree = {"a": torch.ones(1000, device=nccl), "b": [torch.zeros(3, device=nccl)]}
    first = copy_to_cpu(tree)
    assert first["a"].is_pinned()
    pointer = first["a"].data_ptr()
    tree["a"] += 1  # type: ignore[operator]
    assert copy_to_cpu(tree, first)["a"].data_ptr() == pointer
    assert first["a"][0] == 2
