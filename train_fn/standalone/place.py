"""Where a rank runs: its number, its node, its device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import torch

from everstep.errors import UsageError
from everstep.spec.run_spec import RunSpec


@dataclass(frozen=True)
class Place:
    """One process among those that were started together."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str
    launch: str
    """Names who started the process. A process that torchrun starts in place of another one has the
    same."""


def place_from_env(env: Mapping[str, str]) -> Place:
    """Return where torchrun put this process. Raises UsageError if torchrun did not start it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not env.get(name)]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} not set: start this by torchrun, "
            "`torchrun --nproc-per-node 2 -m train_fn.standalone SPEC.yaml`, or alone, `everstep "
            "run SPEC.yaml --local`"
        )
    rank, world_size, local_rank, local_world_size = (int(env[name]) for name in names[:4])
    agent = psutil.Process(os.getppid() if "TORCHELASTIC_RUN_ID" in env else os.getpid())
    return Place(
        rank, world_size, local_rank, local_world_size, os.uname().nodename, launch_of(agent)
    )


def launch_of(process: psutil.Process) -> str:
    """Return a name for ``process`` that no other process has, now or later."""
    return f"{os.uname().nodename}/{process.pid}/{process.create_time():.2f}"


def place_alone() -> Place:
    """Return the place of this process as the only rank."""
    return Place(0, 1, 0, 1, os.uname().nodename, launch_of(psutil.Process()))


def device_of(spec: RunSpec, place: Place) -> torch.device:
    """Return this rank's GPU if the spec wants one and the node has it, else the CPU. Raises
    UsageError."""
    wanted, available = spec.scaling.use_gpu, torch.cuda.device_count()
    if wanted is False or (wanted == "auto" and available < place.local_world_size):
        return torch.device("cpu")
    if available < place.local_world_size:
        raise UsageError(
            f"scaling.use_gpu is true, but {place.node} has {available} GPUs for "
            f"{place.local_world_size} ranks; start fewer, "
            "or set scaling.use_gpu to false"
        )
    return torch.device("cuda", place.local_rank)
