"""A rank that runs in its host's process: a Ray Train function of the user's, which calls Ray's own
API, or a script.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import ray
import ray.train.torch
import torch

from train_fn.node.secrets import process_redactor
from train_fn.ranks import process
from train_fn.ranks.rank import Outside, run_rank
from train_fn.recovery.launch import Position, RankJob, RankLaunch
from train_fn.step.nccl import collective_counts


class OwnProcess:
    """This process as a rank (``worker_actor.Rank``). It serves one attempt.

    Args:
        ip: the node's address in the cluster.
        serve: carries out what a rank asks of its host.
    """

    def __init__(self, launch: RankLaunch, ip: str, serve: Callable[..., Any]) -> None:
        self.pid, self._serve = os.getpid(), serve
        process.prepare(launch, ip, over_nccl=bool(ray.get_gpu_ids()))

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        return _CALLS[name](self, *arguments)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Do nothing: the host ends, too."""

    def train(self, job: RankJob, place: Position) -> str | None:
        """Train to the end (``run_rank``)."""
        process.tell_host(lambda name, *told: self._serve("note", (name, told)))
        outside = Outside(
            lambda *batch: self._serve("deliver", batch),
            lambda name, metrics: self._serve("report", (name, metrics)),
            lambda: self._serve("close_reports", ()),
            partial(_device, job.use_gpu),
        )
        return run_rank(job, place, outside)


_CALLS: dict[str, Callable[..., Any]] = {
    "train": OwnProcess.train,
    "join": lambda rank, *arguments: None,  # Ray does that
    "ping": lambda rank: None,
    "ask_to_yield": lambda rank, *arguments: process.ask_to_yield(*arguments),
    "abandon": lambda rank: process.abandon(),
    "stack": lambda rank: process_redactor()(process.stack()),
    "collective_counts": lambda rank: collective_counts(),
}


@cache
def _device(use_gpu: bool) -> torch.device:
    """Return the rank's device. Ray numbers it among the GPUs of all ranks on the node, which it
    makes visible to each of them once they are created. A process that had used CUDA by then, for
    example to check its node, still sees only its own."""
    if not use_gpu:
        return torch.device("cpu")
    device: torch.device = ray.train.torch.get_device()
    return device if (device.index or 0) < torch.cuda.device_count() else torch.device("cuda", 0)
