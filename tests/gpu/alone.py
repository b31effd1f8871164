"""A run of one rank in this process, for parts that need no Ray: a small regression."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from everstep.spec.run_spec import RunSpec
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.one_rank import one_rank
from tests.support.raw_specs import TASK
from train_fn.context import WorkerContext
from train_fn.standalone.rank import join, place_alone, set_up
from train_fn.step.nccl import begin_attempt

COLLECTIVE_TIMEOUT_S = 60.0


def spec_of(device: torch.device, **train: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "gpu",
            "task": TASK,
            "train": {
                "global_batch_size": 30,
                "micro_batch_size": 30,
                "epochs": 9,
                "max_steps": 12,
                **train,
            },
            "scaling": {"use_gpu": device.type == "cuda"},
            "checkpoint": {"every_steps": None},
        }
    )


def begin(device: torch.device) -> None:
    """Make this process a rank that is alone, as ``everstep run --local`` does."""
    spec = spec_of(device)
    set_up(spec)
    join(spec, place_alone(), COLLECTIVE_TIMEOUT_S)
    begin_attempt()


def run_dir_in(directory: Path) -> RunDir:
    """Return the run directory of a part. Its name is that of no other run on this host."""
    return RunDir(open_storage(str(directory / "storage")), f"run_{directory.name}")


def context_of(run_dir: RunDir, device: torch.device, attempt: int = 1) -> WorkerContext:
    ctx = one_rank(spec_of(device), run_dir, attempt=attempt)
    return dataclasses.replace(ctx, device=device)
